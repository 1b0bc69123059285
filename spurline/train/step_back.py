"""Roll back a loss spike to the checkpoint before it and, on request, skip the data that led there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spurline.moe.dispatch.capacity import restore_capacity_factors
from spurline.train.bad_steps import record_step
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.ranks import Ranks
from spurline.train.metrics.loss_spikes import LossSpike, LossSpikes
from spurline.train.position import Position
from spurline.train.setup import weights_changed
from spurline.train.trainer import Trainer


class SpikeWatch:
    """Decides on the first rank, when a spike has lasted, whether it is rolled back."""

    def __init__(self, trainer: Trainer, say: Callable[[str], None]) -> None:
        training = trainer.config.training
        self._trainer, self._say = trainer, say
        self._enabled = training.on_loss_spike == "step_back"
        self._spikes = LossSpikes(training.loss_spike_patience)
        self._left = training.max_step_backs

    def wants_step_back(self, step: int, loss: float | None, newest: Callable[[int], int | None]) -> int:
        """After a logged step: the step at which a spike began, if it is to be rolled back, else 0.

        It is negative after too many rollbacks. `newest` returns the step of the newest checkpoint before a step.
        """
        if not self._enabled or loss is None or not self._trainer.world.is_first:
            return 0
        spike = self._spikes.add(step, loss)
        if spike is None:
            return 0
        what = f"the loss has jumped to {spike.loss:.3g} from about {spike.usual:.3g} at step {spike.first_step}"
        if newest(spike.first_step) is None:
            self._say(f"warning: {what}, and there is no checkpoint before that to step back to")
            return 0
        self._record(spike)
        self._say(f"{what}, and stays there")
        self._left -= 1
        return spike.first_step if self._left >= 0 else -spike.first_step

    def forget(self) -> None:
        """Forget the spike once it was rolled back: until then, it is the same one in the steps that still follow."""
        self._spikes.forget()

    def too_many(self, first_step: int) -> ValueError:
        return ValueError(
            f"step {first_step}: the loss jumps after {self._trainer.config.training.max_step_backs} step-backs"
            " (--training.max_step_backs): lower --optimizer.lr, or look at the data of the steps in bad_steps.jsonl"
        )

    def _record(self, spike: LossSpike) -> None:
        folder = self._trainer.bad_steps.folder
        if folder is not None:
            found = {"loss": spike.loss, "usual_loss": spike.usual, "action": "step_back"}
            record_step(folder, self._trainer, spike.first_step, found, self._say)


def step_back(
    trainer: Trainer, checkpoints: CheckpointManager, first_step: int, reached: Position, say: Callable[[str], None]
) -> Position:
    """Load the newest checkpoint before `first_step` and remove later ones; returns where the run continues.

    With --training.loss_spike_skip_data that is after all sequences that were read until `reached`.
    """
    Ranks().first(lambda: checkpoints.remove_from(first_step))
    loaded = checkpoints.load_newest(trainer.model, trainer.optimizer)
    assert loaded is not None, "the caller has seen a checkpoint"
    weights_changed(trainer.model)
    step, extra = loaded
    checkpoints.restore_random(step, trainer.config.training.seed)
    restore_capacity_factors(trainer.model, extra.get("capacity_factors"))
    position = Position(step, extra["tokens_seen"], extra["sequences_seen"])
    skipped = reached.sequences_seen - position.sequences_seen
    if trainer.config.training.loss_spike_skip_data:
        say(f"stepping back to the checkpoint of step {step}, and leaving out the {skipped} sequences since")
        position = replace(position, sequences_seen=reached.sequences_seen)
        # A run that is killed before its next checkpoint starts from this one, and must not read them again.
        checkpoints.replace_extra(step, extra | position.stored())
        return position
    say(f"stepping back to the checkpoint of step {step}")
    return position
