"""LayoutCheck: reports the layout check's result, and ends the run on all ranks if it failed."""

from __future__ import annotations

from megatron.errors import NumericsError
from megatron.training.proof.check_process import CheckProcess
from megatron.training.proof.check_result import FAILED, NOT_CHECKED, CheckResult
from megatron.training.proof.policy import CheckPolicy
from megatron.training.step_result import StepResult
from megatron.training.trainer import Callback


class LayoutCheck(Callback):
    """Reports the check in ``process``, which rank 0 has started, and ends the run if the check failed.

    With --prove, the first step waits for the result. Otherwise each step asks for the result, by an all-reduce of two
    values, until it is known; the end of the run waits for it.

    Args:
        policy: decision on the check, the same on all ranks.
        process: the check; None on other ranks, and if the layout is not checked.

    Attributes:
        result: the result on rank 0; None while the check runs.
    """

    def __init__(self, policy: CheckPolicy, process: CheckProcess | None = None) -> None:
        self.policy, self.process = policy, process
        self.result: CheckResult | None = None
        self._is_pending = policy.is_checked
        if not policy.is_checked:
            self.result = CheckResult(NOT_CHECKED, policy.skip_reason)

    def on_step_start(self) -> None:
        if self._is_pending and self.policy.waits:
            self._collect(should_wait=True)
        elif self.policy.is_reported:
            self._report_skipped()

    def on_step_end(self, result: StepResult) -> None:
        if self._is_pending:
            self._collect(should_wait=False)

    def on_train_end(self) -> None:
        """Wait for the result before the last checkpoint is saved, so that a failed check prevents the save."""
        if self._is_pending:
            self._collect(should_wait=bool(self.trainer.steps_taken) and not self.trainer.stop_text)
        self.close()

    def on_exception(self, error: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """End the check if it still runs."""
        if self.process is not None:
            self.process.close()
            self.result = self.process.result

    def _report_skipped(self) -> None:
        assert self.result is not None
        self.trainer.print_line(self.result.line())
        self.policy = CheckPolicy(self.policy.skip_reason)

    def _collect(self, *, should_wait: bool) -> None:
        """Ask rank 0 for the result. Collective.

        Raises:
            NumericsError: the check failed; raised on all ranks.
        """
        if self.process is not None:
            self.result = self.process.wait() if should_wait else self.process.poll()
        has_failed = self.result is not None and self.result.state == FAILED
        is_done, has_failed = self.trainer.world.any_rank([self.result is not None, has_failed])
        if not is_done:
            return
        self._is_pending = False
        if self.result is not None and not has_failed:
            self.trainer.print_line(self.result.line())
        if has_failed:
            error = NumericsError(
                f"{'layout check failed' if self.result is None else self.result.line()}. This layout does not compute "
                "what one process computes. Compare it with tools/check_layout.py and report it, or train in another "
                "layout; --no-prove trains without the check"
            )
            error.is_of_this_rank = False
            raise error
