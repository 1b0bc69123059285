"""The page of `spurline lr-find`: the final loss by rate, and the loss curve of each trial. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from spurline.report.static_page import line_chart, static_page, table


def rates_page(
    title: str,
    about: str,
    verdict: str,
    trials: Sequence[tuple[float, Sequence[float], float]],
    suggested: float | None,
) -> str:
    """Render the page; `trials` are (rate, losses by step, loss by which rates are compared; infinite if diverged)."""
    by_rate = [(lr, loss) for lr, _, loss in trials]
    marks = [(suggested, f"suggested: {suggested:.2g}")] if suggested is not None else []
    rows = [
        (f"{lr:.2e}", f"{losses[0]:.3f}" if losses else "-", f"{loss:.3f}" if math.isfinite(loss) else "diverged")
        for lr, losses, loss in trials
    ]
    courses = [
        (f"hsl({220 - 220 * number / max(1, len(trials) - 1):.0f} 65% 50%)", list(enumerate(losses, 1)))
        for number, (_, losses, _) in enumerate(trials)
    ]
    keys = " ".join(
        f'<span style="color: {color}">■</span> {lr:.1e}'
        for (color, _), (lr, _, _) in zip(courses, trials, strict=True)
    )
    return static_page(
        title,
        f'<p class="soft">{escape(about)}</p><p>{escape(verdict)}</p>',
        "<section><h2>Loss at the end, by rate</h2>",
        line_chart([("var(--accent)", by_rate)], x_label="learning rate", y_label="loss", log_x=True, marks=marks),
        "</section><section><h2>Loss by step</h2>",
        line_chart(courses, x_label="step", y_label="loss"),
        f"<p>{keys}</p></section><section><h2>Rates</h2>",
        table(("rate", "first loss", "loss at the end"), rows),
        "</section>",
    )
