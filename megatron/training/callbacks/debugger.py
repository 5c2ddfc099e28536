"""Debugger: dumps statistics (--debug-dump) and finds non-finite values (--debug-nan) in the steps of an engine."""

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
from megatron.debug.dump_files import GRADIENT, WEIGHT, Samples, Writer, write_manifest
from megatron.debug.hooks import GRAD_INPUT, GRAD_OUTPUT, Finding, FiniteCheck, Seen, Watch
from megatron.debug.statistics import shard_cut
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

MOST_NAMES = 8


def open_dump(config: Config, world: World, modules: Sequence[str], parameters: Sequence[str]) -> Writer:
    """Create the dump and return this rank's writer, with its file open. Collective.

    Args:
        modules, parameters: names of the modules and parameters on this rank.

    Raises:
        ConfigError: a rank cannot write to the folder, the folder contains the dump of another run, or
            --debug-dump-modules matches no name; the same on every rank.
    """
    _check_pattern(config.debug.wanted(), world, modules, parameters)
    folder = Path(str(config.debug.debug_dump))

    def make() -> None:
        try:
            write_manifest(folder, _facts(config, world))
        except (ValueError, OSError) as error:
            raise ConfigError(f"--debug-dump must name a folder for a new dump: {error}. Use another folder") from error

    run_on_rank_0(world, make)
    writer = Writer(folder, world.rank, with_tensors=config.debug.debug_dump_tensors)
    problem = ""
    try:
        writer.make()
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
            f"{', '.join(modules[:MOST_NAMES])}, ... of {world.name}"
        )


def _facts(config: Config, world: World) -> dict[str, Any]:
    """Return the facts about the run that a reader of the dump needs."""
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
        "device": world.kind,
        "schedule": config.parallel.schedule if config.parallel.has_pipeline else None,
        "seed": config.run.seed,
        "torch": torch.__version__,
    }


# The callback: which steps are dumped or checked, and the reaction to a non-finite value. This module is imported only
# with --debug-dump or --debug-nan.


class Debugger(Callback):
    """Watches the modules of one engine during the steps; exists on all ranks or on none. Construction is collective.

    Raises:
        ConfigError: as ``open_dump``.
    """

    def __init__(self, engine: StepEngine, config: Config, world: World, streams: DropoutStreams) -> None:
        self.engine, self.config, self.world, self.streams = engine, config, world, streams
        grid, settings = world.grid, config.debug
        self._dumped = settings.steps() if settings.debug_dump is not None else []
        self._pattern = settings.wanted()
        modules = named_modules(engine.module)
        self._writer: Writer | None = None
        if settings.debug_dump is not None:
            names = [[name for name, _ in named_items] for named_items in (modules, named_parameters(engine.module))]
            self._writer = open_dump(config, world, *names)
        self._is_looking = self._is_dumping = self._has_noted_structure = False
        chunks = getattr(engine.module, "chunks", 1)
        self._chunks = _chunks_of_parameters(engine.module, chunks)
        self._check = FiniteCheck(has_loss=grid.pipe.rank == config.parallel.loss_stage, chunks=chunks)
        self._found: Finding | None = None
        self._has_asked = self._has_started = False
        self._watch = Watch(
            engine.module,
            modules,
            lambda: streams.position.micro_batch,
            self._see,
            chunk=lambda args: args[1] if chunks > 1 and len(args) > 1 else 0,  # as tds.engine.stage calls it
        )

    def on_step_start(self) -> None:
        """Start watching the modules, if this step is dumped or checked."""
        step = self.trainer.samples.step
        self._warn_of_steps_behind(step)
        self._is_dumping = any(step in steps for steps in self._dumped)
        self._is_looking = self._is_dumping or self.config.debug.debug_nan
        if not self._is_looking:
            return
        self._check.clear()
        self._found, self._has_asked, self._has_noted_structure = None, False, False
        if self._is_dumping and self._writer is not None:
            self._writer.begin(step)
            self._dump_weights(self._writer)
        self._watch.start()

    def on_before_update(self, loss: float) -> None:
        """Write the gradients; with --debug-nan, end the run if any rank has found a non-finite value. Collective.

        Raises:
            ModuleError: a value is not finite; raised on all ranks.
        """
        if self._is_looking:
            self._ahead_of_update()

    def on_after_update(self, result: StepResult) -> None:
        if self._is_looking:
            self._end(result)
            self._look_no_longer()

    def find_nonfinite(self, error: NumericsError) -> str | None:
        """Describe this rank's module that produced the non-finite value; None if it is unknown."""
        if isinstance(error, ModuleError):
            return error.found
        if not self._is_looking:
            return None
        finding = self._found if self._has_asked else self._finding()
        self._note(finding)
        return None if finding is None else finding.text

    def on_exception(self, error: BaseException) -> None:
        self._look_no_longer()

    def _look_no_longer(self) -> None:
        """Stop watching the modules and close the dump; no-op if the modules are not watched."""
        if not self._is_looking:
            return
        self._is_looking = False
        self._watch.stop()
        self._check.clear()
        if self._writer is not None:
            self._writer.close()

    def _see(self, seen: Seen, x: torch.Tensor) -> None:
        """Check a tensor of a watched module for non-finite values, and dump it if this step is dumped."""
        self._check.see(seen, x)
        if not self._is_dumping or self._writer is None:
            return
        is_gradient = seen.what in (GRAD_OUTPUT, GRAD_INPUT)
        if is_gradient:
            self._note_loss_structure(self._writer)
        if seen.is_boundary or not self._pattern.search(seen.name):
            return
        samples = self.config.batch.batch_size * self.trainer.num_pieces
        first = self.trainer.samples.share(self.world.grid.data.rank).first + seen.micro_batch
        self._writer.add(
            x,
            seen.name,
            seen.what,
            cut=seen.cut,
            micro_batch=seen.micro_batch,
            samples=Samples(first * samples, (first + 1) * samples),
            call=seen.call,
            index=seen.index,
            chunk=seen.chunk,
            factor=1.0 / self.engine.optimizer.loss_scale if is_gradient else 1.0,
            is_share=seen.is_share,
        )

    def _note_loss_structure(self, writer: Writer) -> None:
        """Record if the loss is weighted; ``dump_files.read`` needs it to scale the gradients that are written later.

        Only the last stage has this information. Its record applies to the tensors of all stages.
        """
        if not self._has_noted_structure and self.engine.has_weighted_loss is not None:
            writer.note("loss", is_weighted=self.engine.has_weighted_loss)
            self._has_noted_structure = True

    def _dump_weights(self, writer: Writer) -> None:
        """Write the weights; with ZeRO 3, this replica's shards of the main params (full weights are temporary)."""
        are_full = self.config.optimizer.zero_stage < 3
        self.engine.optimizer.store.finish_gathers()
        for name, parameter in named_parameters(self.engine.module):
            if self._pattern.search(name):
                is_unsharded = are_full or not parameter.requires_grad
                weight = parameter if is_unsharded else self.engine.optimizer.main_param_of(parameter)
                writer.add(
                    weight, name, WEIGHT, cut=shard_cut(shard_of(weight)), chunk=self._chunks.get(id(parameter), 0)
                )

    @torch.no_grad()
    def _dump_gradients(self, writer: Writer) -> None:
        optimizer = self.engine.optimizer
        optimizer.reducer.sum_over_groups()
        factor = optimizer.gradient_factor / optimizer.loss_scale
        for name, parameter in named_parameters(self.engine.module):
            if not parameter.requires_grad or not self._pattern.search(name):
                continue
            gradient = optimizer.gradient_of(parameter)
            if gradient is not None:
                shard, chunk = shard_cut(optimizer.gradient_shard(parameter)), self._chunks.get(id(parameter), 0)
                writer.add(gradient, name, GRADIENT, cut=shard, chunk=chunk, factor=factor)

    def _ahead_of_update(self) -> None:
        """Write the gradients; with --debug-nan, end the run if any rank has found a non-finite value. Collective."""
        if self._is_dumping and self._writer is not None:
            self._dump_gradients(self._writer)
        self._found, self._has_asked = (
            self._first_of_group(self._check.finding(in_backward=self._counts_gradients())),
            True,
        )
        if not self.config.debug.debug_nan:
            return
        finding = self._found
        self._note(finding)
        has_found = torch.tensor([float(finding is not None)], device=self.world.device)
        if all_reduce(has_found, self.world.grid.world, dist.ReduceOp.MAX).item():
            message = "inputs and outputs of modules must be finite (--debug-nan). The weights are as before this step."
            raise ModuleError(message, finding.text if finding is not None else "")

    def _finding(self) -> Finding | None:
        """Return this rank's first non-finite value. Not collective, because an error has ended the step early."""
        finding = self._check.finding(in_backward=self._counts_gradients())
        return None if finding is None or finding.has_arrived else finding

    def _first_of_group(self, found: Finding | None) -> Finding | None:
        """Return ``found`` if this rank produced the first non-finite value of its tensor group, else None. Collective.

        A non-finite value of one rank spreads to the group with the next all-reduce. Tensors have the same numbers on
        all ranks of the group, so the rank with the smallest number was the first.
        """
        local_number = math.inf if found is None else float(found.number)
        first_number = all_reduce(
            torch.tensor([local_number], device=self.world.device), self.world.grid.tensor, dist.ReduceOp.MIN
        )
        return None if found is None or found.has_arrived or local_number > first_number.item() else found

    def _counts_gradients(self) -> bool:
        """Return False if a smaller fp16 loss scale may avoid non-finite gradients, which are then not reported."""
        return not self.engine.optimizer.scaler.is_to_blame

    def _note(self, found: Finding | None) -> None:
        """Record a non-finite value in the dump."""
        if found is not None and self._is_dumping and self._writer is not None:
            self._writer.note("not finite", text=found.text, name=found.seen.name, what=found.seen.what)

    def _end(self, result: StepResult) -> None:
        """Write the result of a dumped step, and log a non-finite value that did not end the run."""
        if not self._is_dumping or self._writer is None:
            return
        finding = self._found
        if finding is not None:  # the guard has skipped the step, or the value had no effect on the loss
            log.warning(f"{self.world.name}: {finding.text}")
        self._note(finding)
        self._writer.note("end", loss=result.loss, grad_norm=result.grad_norm, is_skipped=result.is_skipped)

    def _warn_of_steps_behind(self, first: int) -> None:
        """Warn at the first step of this start if it is after all steps of --debug-dump-steps."""
        is_first, self._has_started = not self._has_started, True
        if is_first and self._dumped and first >= max(steps.stop for steps in self._dumped) and self.world.rank == 0:
            log.warning(
                f"--debug-dump has no effect: the run continues with step {first}, after --debug-dump-steps "
                f"{self.config.debug.debug_dump_steps}. Set later steps, counted from the first start"
            )


def _chunks_of_parameters(module: Any, chunks: int) -> dict[int, int]:
    """Return parameter id -> the first chunk that contains it; empty for a model with one chunk."""
    if chunks == 1:
        return {}
    return {id(parameter): chunk for chunk in reversed(range(chunks)) for parameter in module.parameters_of(chunk)}
