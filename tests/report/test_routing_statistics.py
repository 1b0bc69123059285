"""Which experts fire on which text: counted by hand on made-up visits, and shown on a page."""

import numpy as np

from spurline.report.routing_page import routing_page
from spurline.report.routing_statistics import Visits, layer_statistics

# Tokens 0 and 1 always visit expert 0; token 2 visits expert 1; all go to expert 2 too. Expert 3 is never visited.
TOKENS = np.array([[0, 1, 2, 2], [2, 0, 0, 1]])
IDS = np.array([[0, 2] if token < 2 else [1, 2] for token in TOKENS.ravel()])
WEIGHTS = np.array([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8], [0.7, 0.3], [0.5, 0.5], [0.5, 0.5], [0.95, 0.05]])
VISITS = Visits(TOKENS, {"layers.1.moe": IDS}, {"layers.1.moe": WEIGHTS}, {"layers.1.moe": 4})
FOUND = layer_statistics(VISITS, "layers.1.moe", num_contexts=2)


def test_shares_and_weights_are_those_of_the_visits() -> None:
    assert [expert.share for expert in FOUND.experts] == [5 / 16, 3 / 16, 8 / 16, 0]
    assert FOUND.dead == 1
    assert FOUND.busiest == 2.0
    assert np.isclose(FOUND.experts[0].mean_weight, (0.9 + 0.6 + 0.5 + 0.5 + 0.95) / 5)


def test_tokens_that_prefer_an_expert_come_first() -> None:
    """By visits beyond the expert's share: token 0 comes to expert 0 three times, where 1.875 are explained."""
    assert FOUND.experts[0].tokens == [(0, 3, 1.0), (1, 2, 1.0)]
    assert FOUND.experts[1].tokens == [(2, 3, 1.0)]
    assert FOUND.experts[2].tokens == []  # every token goes there as its share says
    assert FOUND.experts[3].tokens == []


def test_contexts_are_where_an_expert_weighs_most_one_for_each_token() -> None:
    places = [(context.sequence, context.position, context.weight) for context in FOUND.experts[0].contexts]
    assert places == [(1, 3, 0.95), (0, 0, 0.9)]
    assert FOUND.experts[3].contexts == []


def test_pairs_are_counted_against_chance() -> None:
    together = FOUND.together_EE
    assert np.allclose(together, together.T)
    assert together[0, 1] == 0
    # Five of eight tokens visit both 0 and 2: of 16 ordered pairs, 5 are (0, 2), where chance has 16 * 5/16 * 1/2.
    assert np.isclose(together[0, 2], 5 / (16 * 5 / 16 / 2))
    assert not together[3].any()
    assert not np.diag(together).any()


def test_page_shows_tokens_as_text_and_escapes_them() -> None:
    page = routing_page(
        "Routing of a <run>", "8 tokens", VISITS, {"layers.1.moe": FOUND}, lambda ids: "".join("a<\n"[i] for i in ids)
    )
    assert "Routing of a &lt;run&gt;" in page
    assert '<span class="chip" title="2 visits">&lt;</span>100%' in page
    assert "⏎aa<mark>&lt;</mark>" in page
    assert page.count("<rect") == 4 * 3
    assert "<script" not in page
