"""RestoreOptions: the state that a start restores from a checkpoint in addition to the weights."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import CheckpointConfig


@dataclass(frozen=True)
class RestoreOptions:
    """The state that a start restores from a checkpoint in addition to the weights.

    Args:
        counters: restore step, update and sample counts.
        data: restore the position in the training data. The run must have the checkpoint's data.
        optimizer: restore moments, loss scale and callback states.
        generators: restore torch's random generator states.
    """

    counters: bool = True
    data: bool = True
    optimizer: bool = True
    generators: bool = True

    @classmethod
    def from_flags(cls, flags: CheckpointConfig) -> RestoreOptions:
        """Return the options selected by --finetune, --eval-only, --load-weights-only and --no-load-*."""
        continues_run = not flags.finetune and not flags.eval_only
        has_state = continues_run and not flags.load_weights_only
        return cls(
            counters=not flags.finetune,
            data=continues_run,
            optimizer=has_state and not flags.no_load_optim,
            generators=has_state and not flags.no_load_rng,
        )


EVERYTHING = RestoreOptions()
