"""What is saved, where, and what a start goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.option import option


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The run folder and its checkpoints."""

    save: str | None = option(None, "run folder: checkpoints, metrics, pictures", shown_default="runs/<script>-<time>")
    load: str | None = option(None, "run folder or checkpoint to go on from")
    save_interval: int = option(0, "steps between checkpoints; 0: only at the end or when stopped", minimum=0)
    resume: bool = option(False, "go on from the newest checkpoint of the newest run")
    no_load_optim: bool = option(False, "leave the optimizer's state of the checkpoint out")
    no_load_rng: bool = option(False, "leave the random states of the checkpoint out")
    allow_data_change: bool = option(
        False,
        "go on although the data are not those of the checkpoint: a corpus that agrees goes on where it was, others "
        "start at their first sample",
    )
    finetune: bool = option(False, "load the weights only and count steps and samples from 0")
    no_save_optim: bool = option(False, "save no optimizer state; such a checkpoint cannot be resumed exactly")
    eval_only: bool = option(False, "evaluate the loaded model on the test split and stop")
    keep_last: int | None = option(None, "checkpoints to keep", minimum=1, shown_default="all")

    def problems(self) -> Iterator[str]:
        """Yield what cannot be: flags that need a checkpoint without one."""
        if self.load is not None and self.resume:
            yield f"give --load or --resume, not both: got --load {self.load} and --resume. Leave one out"
        needy = ("no_load_optim", "no_load_rng", "finetune", "eval_only", "allow_data_change")
        for name in needy if self.load is None and not self.resume else ():
            if getattr(self, name):
                yield f"--{name.replace('_', '-')} needs a checkpoint, got none. Add --load FOLDER"
