"""Log lines of ``steps_per_print`` and ``wall_clock_breakdown`` on rank 0, and events for DeepSpeed's monitors.

"steps_per_print" uses DeepSpeed's logger, so the line depends on that logger's level. The timers always print, as in
DeepSpeed. Both report means over the steps since the previous line. DeepSpeed's monitors (TensorBoard, CSV, ...) get
every step and every evaluation under DeepSpeed's names. With several stages, the line and the monitors also report the
bubble in these steps; this does not affect ``engine.bubble()``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tds.deepspeed.api import log_dist
from tds.deepspeed.api import logger as _deepspeed_logger
from tds.engine.report import PHASES, TRAIN_BATCH, untimed
from tds.loss_reduction import MeanLosses


class StepReport:
    """Times and reports one engine's training steps.

    Args:
        bubble: returns the bubble since its last call. Collective over the pipeline.
    """

    def __init__(self, engine: Any, bubble: Callable[[], float | None]) -> None:
        self._engine, self._measure_bubble = engine, bubble
        self._num_steps = 0
        self._elapsed_s = 0.0
        self.time_phase = self._timed if engine.wall_clock_breakdown() else untimed

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to the timer ``name``; on a GPU, the time of the device."""
        timer = self._engine.timers(name)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one ``train_batch`` and write the lines that are due after it."""
        start = time.perf_counter()
        with self.time_phase(TRAIN_BATCH):
            yield
        self._elapsed_s += time.perf_counter() - start
        self._num_steps += 1
        period = self._engine.steps_per_print()
        if self._engine.global_steps % (period or 1) == 0:
            self._write(None if period is None or self._engine.num_stages == 1 else self._bubble(), period is not None)
            self._num_steps, self._elapsed_s = 0, 0.0

    def _bubble(self) -> float | None:
        """Return the bubble since the last line and write it to the monitors. Collective over the pipeline."""
        bubble = self._measure_bubble()
        if bubble is not None:
            _write_events(self._engine, {"bubble": bubble})
        return bubble

    def _write(self, bubble: float | None, should_log: bool) -> None:
        engine = self._engine
        if engine.wall_clock_breakdown():
            engine.timers.log(list(PHASES), normalizer=self._num_steps)
            # DeepSpeed's hooks start further timers, which would accumulate.
            for timer in engine.timers.get_timers().values():
                timer.reset()
        if should_log and engine.global_rank == 0 and _deepspeed_logger.isEnabledFor(logging.INFO):
            step_s = self._elapsed_s / self._num_steps
            extra = "".join(f"{name}: {mean:0.4f} " for name, mean in (engine.agg_additional_losses or {}).items())
            log_dist(
                f"steps: {engine.global_steps} loss: {engine.agg_train_loss:0.4f} {extra}iter time (s): {step_s:0.3f} "
                f"samples/sec: {engine.train_batch_size() / step_s:0.3f}"
                + ("" if bubble is None else f" bubble: {100 * bubble:0.1f} %"),
                ranks=[0],
            )

    def write_training(self, means: MeanLosses) -> None:
        """Write the losses, the learning rate and (with fp16) the loss scale of a step to the monitors."""
        engine = self._engine
        if not engine.monitor.enabled:
            return
        loss, *additional = means.values.items()
        values = {"train_loss": loss[1]} | dict(additional)
        values["lr"] = engine.get_lr()[0]
        if engine.fp16_enabled():
            values["loss_scale"] = engine.optimizer.loss_scale
        _write_events(engine, values)

    def write_evaluation(self, means: MeanLosses) -> None:
        """Write the losses of an evaluation to the monitors."""
        loss, *additional = means.values.items()
        _write_events(self._engine, {"eval_loss": loss[1], **{f"eval_{name}": mean for name, mean in additional}})


def _write_events(engine: Any, values: dict[str, float]) -> None:
    if engine.global_rank == 0 and engine.monitor.enabled:
        engine.monitor.write_events(
            [(f"Train/Samples/{name}", value, engine.global_samples) for name, value in values.items()]
        )
