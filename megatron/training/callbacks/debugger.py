"""Debugger: dumps statistics (--debug-dump) and finds non-finite values (--debug-nan) in an engine's steps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron import log
from megatron.checkpoint import named_parameters
from megatron.config import Config
from megatron.debug.dump_files import GRADIENT, WEIGHT, DumpWriter, SampleRange, write_manifest
from megatron.debug.hooks import GRAD_INPUT, GRAD_OUTPUT, Finding, FiniteCheck, ModuleWatcher, TensorInfo
from megatron.debug.statistics import slice_of_shard
from megatron.errors import ConfigError, NumericsError
from megatron.models.common.parameters import named_modules
from megatron.mpu.mappings import all_reduce
from megatron.mpu.random import DropoutStreams
from megatron.mpu.shard import shard_of
from megatron.training.rank_0 import run_on_rank_0
from megatron.training.step_engine import StepEngine
from megatron.training.step_result import ModuleError, StepResult
from megatron.training.trainer import Callback
from megatron.training.world import World

# Opening a dump: create its folder and the file of each rank, and check the selection of modules.

MAX_NAMES = 8


def open_dump(config: Config, world: World, modules: Sequence[str], parameters: Sequence[str]) -> DumpWriter:
    """Create the dump and return this rank's writer, with its file open. Collective.

    Args:
        modules, parameters: modules and parameters on this rank, by name.

    Raises:
        ConfigError: a rank cannot write to the folder, the folder contains the dump of another run, or
            --debug-dump-modules matches no name; the same on every rank.
    """
    _check_pattern(config.debug.name_pattern(), world, modules, parameters)
    folder = Path(str(config.debug.debug_dump))

    def create_manifest() -> None:
        try:
            write_manifest(folder, _manifest(config, world))
        except (ValueError, OSError) as error:
            raise ConfigError(f"--debug-dump must name a folder for a new dump: {error}. Use another folder") from error

    run_on_rank_0(world, create_manifest)
    writer = DumpWriter(folder, world.rank, with_tensors=config.debug.debug_dump_tensors)
    problem = ""
    try:
        writer.create_files()
    except OSError as error:
        problem = f"{world.name}: {error}"
    if problems := [text for text in world.grid.host.gather_objects(problem) if text]:
        raise ConfigError(f"--debug-dump must name a folder that every rank can write to, got {'; '.join(problems)}")
    return writer


def _check_pattern(pattern: re.Pattern[str], world: World, modules: Sequence[str], parameters: Sequence[str]) -> None:
    is_known = any(map(pattern.search, (*modules, *parameters)))
    if not any(world.grid.host.gather_objects(is_known)):
        raise ConfigError(
            f"--debug-dump-modules must match a module or parameter, got {pattern.pattern!r}, which matches none of "
            f"{', '.join(modules[:MAX_NAMES])}, ... of {world.name}"
        )


def _manifest(config: Config, world: World) -> dict[str, Any]:
    """Build the dump's manifest: the layout, dtype and other properties of the run that a reader needs."""
    grid = world.grid
    coordinates = [grid.topology.coordinate(rank) for rank in range(grid.topology.world_size)]
    return {
        "family": config.family,
        "layout": {"tensor": grid.tensor.size, "pipe": grid.pipe.size, "data": grid.data.size},
        "placement": config.parallel.placement,
        "world_size": len(coordinates),
        "ranks": [
            {"stage": coordinate.pipe, "tensor": coordinate.tensor, "data": coordinate.data}
            for coordinate in coordinates
        ],
        "micro_batch_size": config.batch.batch_size,
        "dtype": config.precision.dtype,
        "device": world.device_type,
        "schedule": config.parallel.schedule if config.parallel.has_pipeline else None,
        "seed": config.run.seed,
        "torch": torch.__version__,
    }


# The callback: which steps are dumped or checked, and the reaction to a non-finite value. This module is imported only
# with --debug-dump or --debug-nan.


class Debugger(Callback):
    """Watches one engine's modules during the steps; exists on all ranks or on none. Construction is collective.

    Raises:
        ConfigError: raised by ``open_dump``.
    """

    def __init__(self, engine: StepEngine, config: Config, world: World, streams: DropoutStreams) -> None:
        self.engine, self.config, self.world, self.streams = engine, config, world, streams
        grid, settings = world.grid, config.debug
        self._dump_ranges = settings.steps() if settings.debug_dump is not None else []
        self._pattern = settings.name_pattern()
        modules = named_modules(engine.module)
        self._writer: DumpWriter | None = None
        if settings.debug_dump is not None:
            names = [[name for name, _ in named_items] for named_items in (modules, named_parameters(engine.module))]
            self._writer = open_dump(config, world, *names)
        self._is_watching = self._is_dumping = self._has_noted_loss = False
        num_chunks = getattr(engine.module, "chunks", 1)
        self._chunk_by_parameter = _chunk_by_parameter(engine.module, num_chunks)
        self._finite_check = FiniteCheck(has_loss=grid.pipe.rank == config.parallel.loss_stage, num_chunks=num_chunks)
        self._agreed_finding: Finding | None = None
        self._has_agreed = self._has_started = False
        self._watcher = ModuleWatcher(
            engine.module,
            modules,
            lambda: streams.position.micro_batch,
            self._on_tensor,
            chunk=lambda args: args[1] if num_chunks > 1 and len(args) > 1 else 0,  # args: (input, chunk)
        )

    def on_step_start(self) -> None:
        """Start watching the modules, if this step is dumped or checked."""
        step = self.trainer.samples.step
        self._warn_if_steps_have_passed(step)
        self._is_dumping = any(step in steps for steps in self._dump_ranges)
        self._is_watching = self._is_dumping or self.config.debug.debug_nan
        if not self._is_watching:
            return
        self._finite_check.clear()
        self._agreed_finding, self._has_agreed, self._has_noted_loss = None, False, False
        if self._is_dumping and self._writer is not None:
            self._writer.begin(step)
            self._dump_weights(self._writer)
        self._watcher.start()

    def on_before_update(self, loss: float) -> None:
        """Write the gradients; with --debug-nan, end the run if any rank has found a non-finite value. Collective.

        Raises:
            ModuleError: a value is not finite; raised on all ranks.
        """
        if self._is_watching:
            self._check_before_update()

    def on_after_update(self, result: StepResult) -> None:
        if self._is_watching:
            self._write_step_end(result)
            self._stop_watching()

    def find_nonfinite(self, error: NumericsError) -> str | None:
        """Describe this rank's module that produced the non-finite value; None if it is unknown."""
        if isinstance(error, ModuleError):
            return error.location
        if not self._is_watching:
            return None
        finding = self._agreed_finding if self._has_agreed else self._find_local()
        self._note_finding(finding)
        return None if finding is None else finding.text

    def on_exception(self, error: BaseException) -> None:
        self._stop_watching()

    def _stop_watching(self) -> None:
        """Stop watching the modules and close the dump; no-op if the modules are not watched."""
        if not self._is_watching:
            return
        self._is_watching = False
        self._watcher.stop()
        self._finite_check.clear()
        if self._writer is not None:
            self._writer.close()

    def _on_tensor(self, info: TensorInfo, x: torch.Tensor) -> None:
        """Check a watched module's tensor for non-finite values, and dump it if this step is dumped."""
        self._finite_check.record(info, x)
        if not self._is_dumping or self._writer is None:
            return
        is_gradient = info.tensor_type in (GRAD_OUTPUT, GRAD_INPUT)
        if is_gradient:
            self._note_loss(self._writer)
        if info.is_boundary or not self._pattern.search(info.name):
            return
        samples_per_micro_batch = self.config.batch.batch_size * self.trainer.num_sequences_per_sample
        micro_batch_idx = self.trainer.samples.share(self.world.grid.data.rank).index_in_step(info.micro_batch)
        self._writer.add(
            x,
            info.name,
            info.tensor_type,
            shard_slice=info.shard_slice,
            micro_batch=info.micro_batch,
            samples=SampleRange(
                micro_batch_idx * samples_per_micro_batch, (micro_batch_idx + 1) * samples_per_micro_batch
            ),
            call=info.call,
            index=info.index,
            chunk=info.chunk,
            factor=1.0 / self.engine.optimizer.loss_scale if is_gradient else 1.0,
            is_share=info.is_share,
        )

    def _note_loss(self, writer: DumpWriter) -> None:
        """Record whether the loss is weighted; ``read_dump`` needs this to scale the gradients that are written later.

        Only the last stage has this information. The record applies to tensors on all stages.
        """
        if not self._has_noted_loss and self.engine.has_weighted_loss is not None:
            writer.note("loss", is_weighted=self.engine.has_weighted_loss)
            self._has_noted_loss = True

    def _dump_weights(self, writer: DumpWriter) -> None:
        """Write the weights; with ZeRO 3, this replica's shards of the main params (full weights are temporary)."""
        are_full = self.config.optimizer.zero_stage < 3
        self.engine.optimizer.store.finish_gathers()
        for name, parameter in named_parameters(self.engine.module):
            if self._pattern.search(name):
                is_unsharded = are_full or not parameter.requires_grad
                weight = parameter if is_unsharded else self.engine.optimizer.main_param_of(parameter)
                writer.add(
                    weight,
                    name,
                    WEIGHT,
                    shard_slice=slice_of_shard(shard_of(weight)),
                    chunk=self._chunk_by_parameter.get(id(parameter), 0),
                )

    @torch.no_grad()
    def _dump_gradients(self, writer: DumpWriter) -> None:
        optimizer = self.engine.optimizer
        optimizer.reducer.sum_over_groups()
        factor = optimizer.gradient_factor / optimizer.loss_scale
        for name, parameter in named_parameters(self.engine.module):
            if not parameter.requires_grad or not self._pattern.search(name):
                continue
            gradient = optimizer.gradient_of(parameter)
            if gradient is not None:
                shard, chunk = (
                    slice_of_shard(optimizer.gradient_shard(parameter)),
                    self._chunk_by_parameter.get(id(parameter), 0),
                )
                writer.add(gradient, name, GRADIENT, shard_slice=shard, chunk=chunk, factor=factor)

    def _check_before_update(self) -> None:
        """Write the gradients; with --debug-nan, end the run if any rank has found a non-finite value. Collective."""
        if self._is_dumping and self._writer is not None:
            self._dump_gradients(self._writer)
        self._agreed_finding, self._has_agreed = (
            self._first_of_group(self._finite_check.first_nonfinite(in_backward=self._should_report_gradients())),
            True,
        )
        if not self.config.debug.debug_nan:
            return
        finding = self._agreed_finding
        self._note_finding(finding)
        has_found = torch.tensor([float(finding is not None)], device=self.world.device)
        if all_reduce(has_found, self.world.grid.world, dist.ReduceOp.MAX).item():
            message = "inputs and outputs of modules must be finite (--debug-nan). The weights are as before this step."
            raise ModuleError(message, finding.text if finding is not None else "")

    def _find_local(self) -> Finding | None:
        """Return this rank's first non-finite value. Not collective, because an error has ended the step early."""
        finding = self._finite_check.first_nonfinite(in_backward=self._should_report_gradients())
        return None if finding is None or finding.is_from_outside else finding

    def _first_of_group(self, finding: Finding | None) -> Finding | None:
        """Return ``finding`` if this rank has the tensor group's first non-finite value, else None. Collective.

        A non-finite value on one rank spreads to the group with the next all-reduce. Tensors have the same indices on
        all ranks in the group, so the rank with the smallest index was the first.
        """
        local_idx = math.inf if finding is None else float(finding.tensor_idx)
        first_idx = all_reduce(
            torch.tensor([local_idx], device=self.world.device), self.world.grid.tensor, dist.ReduceOp.MIN
        )
        return None if finding is None or finding.is_from_outside or local_idx > first_idx.item() else finding

    def _should_report_gradients(self) -> bool:
        """Return False if a smaller fp16 loss scale may avoid non-finite gradients, which are then not reported."""
        return not self.engine.optimizer.scaler.can_decrease

    def _note_finding(self, finding: Finding | None) -> None:
        if finding is not None and self._is_dumping and self._writer is not None:
            self._writer.note("not finite", text=finding.text, name=finding.info.name, what=finding.info.tensor_type)

    def _write_step_end(self, result: StepResult) -> None:
        """Write the result of a dumped step, and log a non-finite value that did not end the run."""
        if not self._is_dumping or self._writer is None:
            return
        finding = self._agreed_finding
        if finding is not None:  # the guard has skipped the step, or the value had no effect on the loss
            log.warning(f"{self.world.name}: {finding.text}")
        self._note_finding(finding)
        self._writer.note("end", loss=result.loss, grad_norm=result.grad_norm, is_skipped=result.is_skipped)

    def _warn_if_steps_have_passed(self, first_step: int) -> None:
        """Warn if this start begins after the last step in --debug-dump-steps; only the first call has an effect."""
        is_first_step, self._has_started = not self._has_started, True
        if (
            is_first_step
            and self._dump_ranges
            and first_step >= max(steps.stop for steps in self._dump_ranges)
            and self.world.rank == 0
        ):
            log.warning(
                f"--debug-dump has no effect: the run continues with step {first_step}, after --debug-dump-steps "
                f"{self.config.debug.debug_dump_steps}. Set later steps, counted from the first start"
            )


def _chunk_by_parameter(module: Any, num_chunks: int) -> dict[int, int]:
    """Map each parameter id to the first chunk that contains the parameter; empty for a model with one chunk."""
    if num_chunks == 1:
        return {}
    return {id(parameter): chunk for chunk in reversed(range(num_chunks)) for parameter in module.parameters_of(chunk)}
