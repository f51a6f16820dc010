"""Hugging Face's Trainer: a callback that attaches to it and marks certified checkpoints (paper, section 8).

The Trainer does not expose its position in the data, so a job resumes from a checkpoint that the Trainer
wrote. SCOUT's own checkpoints need a custom training loop, such as one with Accelerate.
"""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from torchscout.adapters.versions import require
from torchscout.attach import enable_resiliency

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from torchscout.session.session import Session

__all__ = ["ResiliencyCallback", "trusted_checkpoint"]

_MARK = "torchscout.json"


class ResiliencyCallback(TrainerCallback):  # type: ignore[misc]  # transformers is seen as Any
    """``trainer.add_callback(ResiliencyCallback(trainer))`` attaches while the Trainer trains."""

    def __init__(self, trainer: Trainer, **settings: Any) -> None:
        """``settings`` are the arguments of ``enable_resiliency``, except ``checkpoint``."""
        if "checkpoint" in settings:
            raise ValueError(
                "a Trainer resumes from checkpoints that it writes itself; leave out checkpoint=, and start "
                "with trainer.train(resume_from_checkpoint=trusted_checkpoint(output_dir))"
            )
        attributes = [(trainer, name) for name in ("add_callback", "model_wrapped", "optimizer")]
        require("transformers", transformers.__version__, {}, attributes)
        self._trainer, self._settings = trainer, settings
        self.session: Session | None = None
        """None before training begins; closed when it ends."""
        self._unmarked: dict[int, Path] = {}
        """Checkpoints that are not certified yet, by step."""
        self._phase = ExitStack()

    def on_train_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        trainer = self._trainer
        self._unmarked.clear()
        self.session = enable_resiliency(trainer.model_wrapped, trainer.optimizer, **self._settings)
        self.session.start_from(state.global_step)

    def on_step_end(self, _: Any, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        self._mark(state)
        self._announce(control)

    def on_epoch_end(self, _: Any, __: Any, control: TrainerControl, **___: Any) -> None:
        self._announce(control)

    def on_evaluate(self, _: Any, __: Any, control: TrainerControl, **___: Any) -> None:
        self._phase.close()
        if self.session is not None and control.should_save:
            self._phase.enter_context(self.session.checkpoint_io("write"))

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        self._phase.close()
        step, folder = state.global_step, Path(str(args.output_dir))
        self._unmarked[step] = folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        if state.is_world_process_zero:  # an earlier run may have left its mark there
            (self._unmarked[step] / _MARK).unlink(missing_ok=True)
        self._mark(state)

    def on_train_end(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        self._phase.close()
        self._mark(state)
        if self.session is not None:
            self.session.close()

    def _announce(self, control: TrainerControl) -> None:
        """Announce that the Trainer is about to evaluate or save, which takes longer than a step."""
        if self.session is not None and control.should_evaluate:
            self._phase.enter_context(self.session.evaluation())
        elif self.session is not None and control.should_save:
            self._phase.enter_context(self.session.checkpoint_io("write"))

    def _mark(self, state: TrainerState) -> None:
        """Mark the checkpoints whose state is certified. Damage to the files themselves is not detected."""
        certified = None if self.session is None else self.session.certified_step
        for step in [each for each in self._unmarked if certified is not None and each <= certified]:
            folder = self._unmarked.pop(step)
            if state.is_world_process_zero and folder.is_dir():
                (folder / _MARK).write_text(json.dumps({"step": step, "certified_at_step": certified}))


def trusted_checkpoint(output_dir: str | Path) -> str | None:
    """Return the Trainer's newest checkpoint in this folder whose state is certified, or None."""
    marked = [each.parent for each in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{_MARK}")]
    steps = {int(found[1]): each for each in marked if (found := re.fullmatch(r".*-(\d+)", each.name))}
    return str(steps[max(steps)]) if steps else None
