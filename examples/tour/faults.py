"""Train as pretrain_gpt2.py does, with one deliberate fault. ``bash run_gpt2.sh --tour`` shows how each is detected.

    TOUR_FAULT=nan:6 program=examples/tour/faults.py bash run_gpt2.sh --train-iters 8 --debug-nan

| TOUR_FAULT | fault |
|---|---|
| kill:N | the last rank is killed by SIGKILL in step N, between the backward and the update |
| nan:N | in step N, one value in the output of layers.2.mlp becomes NaN |
| leak | context ranks ignore the ends of documents: tokens attend to the documents before their own |
| gradient | the gradients of norms and biases are not summed over the tensor ranks (needs ``--sequence-parallel``) |
| host:N | the launcher of NODE_RANK 1 and all its ranks are killed in step N |

Each fault replaces a function at run time or is a callback of the trainer; the package contains no fault. ``kill`` and
``host`` take effect only in the first start of a job, so that the restarted job can complete.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron import mpu
from megatron.training import Callback, pretrain
from megatron.training.programs import decoder

if TYPE_CHECKING:
    import torch

VARIABLE = "TOUR_FAULT"
NAN_MODULE = "layers.2.mlp"


class KillInStep(Callback):
    """Kills process ``target()`` in step ``step`` of the job's first start, between the backward and the update.

    Args:
        is_victim: returns True on the rank that kills the process.
        target: returns the id of the process to kill.
    """

    def __init__(self, step: int, is_victim: Callable[[], bool], target: Callable[[], int]) -> None:
        self._step, self._is_victim, self._target = step, is_victim, target

    def on_before_update(self, loss: float) -> None:
        is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if is_first_start and self.trainer.progress.step + 1 == self._step and self._is_victim():
            os.kill(self._target(), signal.SIGKILL)
            signal.pause()  # a killed launcher also ends this rank


class NanInStep(Callback):
    """Writes NaN into one value of the output of ``NAN_MODULE``, in the first micro-batch of step ``step``.

    The hook runs before the module's other hooks, which therefore see the NaN as the module's output.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._hook: Any = None

    def on_step_start(self) -> None:
        from megatron.models.common.parameters import named_modules

        module = dict(named_modules(self.trainer.engine.module)).get(NAN_MODULE)
        if self.trainer.progress.step + 1 == self._step and module is not None and mpu.get_grid().tensor.rank == 0:
            self._hook = module.register_forward_hook(self._corrupt, prepend=True)

    def _corrupt(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._hook.remove()
        tensor = output[0] if isinstance(output, tuple) else output  # [s, b, h]
        tensor.detach()[0, 0, 0] = float("nan")


def ignore_documents() -> None:
    """Compute the attention masks of context ranks as if each sample were one document."""
    from megatron.models.common.masks import Masks

    get_mask = Masks.get_mask

    def get_leaking_mask(
        self: Masks, x: torch.Tensor, segment_ids: torch.Tensor | None = None, has_window: bool = False
    ) -> torch.Tensor | None:
        is_context_rank = self._parallel.context.size > 1
        return get_mask(self, x, None if is_context_rank else segment_ids, has_window)

    Masks.get_mask = get_leaking_mask  # type: ignore[method-assign]


def skip_sums_of_norms() -> None:
    """Exclude vectors (norms and biases) from the gradients that are summed over the tensor ranks."""
    from megatron.optim.gradients import reducer

    is_partial = reducer.is_partial
    reducer.is_partial = lambda parameter: is_partial(parameter) and parameter.ndim > 1  # type: ignore[attr-defined]


def apply(fault: str) -> list[Callback]:
    """Apply ``fault``, a value of TOUR_FAULT, and return its callbacks."""
    name, _, step = fault.partition(":")
    if name in ("kill", "host", "nan") and step.isdecimal():
        if name == "nan":
            return [NanInStep(int(step))]
        if name == "host":
            return [KillInStep(int(step), lambda: os.environ.get("NODE_RANK") == "1", os.getppid)]
        return [KillInStep(int(step), lambda: os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1), os.getpid)]
    if fault == "leak":
        ignore_documents()
    elif fault == "gradient":
        skip_sums_of_norms()
    elif fault:
        sys.exit(f"{VARIABLE} must be kill:STEP, nan:STEP, leak, gradient or host:STEP, got {fault}")
    return []


if __name__ == "__main__":
    pretrain(
        decoder.train_valid_test_datasets_provider,
        decoder.model_provider,
        decoder.forward_step,
        name="gpt2",
        accepts_model=True,
        callbacks=apply(os.environ.get(VARIABLE, "")),
    )
