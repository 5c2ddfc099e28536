"""ScheduleEngine: trains and evaluates a model that is split into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tds.bubble_timer import Row
from tds.bucket_reducer import BucketReducer
from tds.device import is_host, keep_freed, preserve_rng_states
from tds.engine import build
from tds.engine.evaluate import check_arguments, mean_output
from tds.engine.grid import PipelineGrid
from tds.engine.micro_batches import BatchSource, BothEndsSource
from tds.engine.monitor import EngineMonitor, Names
from tds.engine.optimizer_gradients import OptimizerGradients
from tds.engine.pipeline_json import PipelineSettings
from tds.engine.recompute import NoRecompute, Recompute
from tds.engine.report import REDUCTION, STEP, NoReport, Report
from tds.engine.stage_call import Call
from tds.engine.update import OptimizerUpdate, Update
from tds.grad_norm import clip, global_norm, is_counted_in_norm
from tds.gradients import GradientSource, reduce_gradients, reduce_tied_gradients
from tds.log import log_rank_0
from tds.loss import LossMeter
from tds.loss_reduction import LossReduction, MeanLosses, all_reduce_loss, read_with_norm
from tds.p2p import boundary
from tds.p2p.collective_scope import collective_scope
from tds.p2p.communicator import P2PCommunicator
from tds.p2p.process_groups import set_group_timeouts
from tds.renamed import Renamed
from tds.schedule import Action
from tds.user_functions import BatchFn


class ScheduleEngine:
    """Trains the layers of one stage: ``train_batch`` runs the forwards and backwards of a schedule, then the update.

    Attributes that a program may set:

        nominal_weight    power of two by which losses returned as ``tds.Weighted`` are divided in the backward. A value
                          near the number of tokens per step, over all replicas, keeps 16-bit gradients in range
        mean_num_micro_batches
                          mean number of micro-batches per replica, if the replicas have different numbers. None: all
                          replicas have the same number
        on_micro_batch    called with the index of the micro-batch before each forward in training
        on_action         called with each action before it runs, in training and in evaluation
        agrees_on_data    False: skip the small messages before and after each call by which all ranks detect a loader
                          that ends early. For programs whose loaders never end. Must be equal on every rank
        on_loss           called with the mean loss, which is equal on every rank, before the update; may raise.
                          ``engine.means.values`` then has this loss and all others as Python floats

    Args:
        module: the layers of this stage: a callable that takes the inputs (and the chunk index, if a stage has several
            chunks) and has ``parameters()``, ``train()``, ``eval()``, ``loss_fn``, ``get_additional_losses()`` and
            ``get_tied_weights_and_groups()``. Optional: ``chunks``, ``placement``, the declarations of
            ``tds.p2p.boundary``, ``activation_checkpoint_interval``, ``dynamic_shape``, ``made_output``.
        grid: the process groups and this rank's position in them.
        device: the device of the module.
        optimizer: an optimizer with torch's interface; None: the engine only evaluates.
        micro_batches: number of micro-batches per replica and step.
        settings: see ``PipelineSettings``.
        gradients: access to the gradients that the optimizer reads. None: ``optimizer.gradient_source``, or
            ``OptimizerGradients`` if the optimizer has none.
        update: clips, steps and counts; None: ``optimizer.step()`` after clipping to ``settings.gradient_clipping``.
        recompute: activation recomputation of the layers.
        report: receives times and losses.
        names: names of the ranks and layers, for messages and the table of stages.
        world_group: process group of all ranks; None: the default group.
    """

    def __init__(
        self,
        module: Any,
        grid: PipelineGrid,
        device: torch.device,
        optimizer: Any,
        *,
        micro_batches: int,
        settings: PipelineSettings,
        names: Names,
        gradients: GradientSource | None = None,
        update: Update | None = None,
        recompute: Recompute | None = None,
        report: Report | None = None,
        world_group: Any = None,
    ) -> None:
        if is_host(device):
            keep_freed()
        self.module, self.grid, self.device, self.optimizer = module, grid, device, optimizer
        self.global_rank = grid.get_global_rank()
        self.num_stages, self.stage_id = grid.pipe_parallel_size, grid.get_stage_id()
        placement = build.placement_of(module, self.num_stages)
        self.loss_stage = placement.last_stage
        has_both_ends = self.loss_stage == 0 and placement.num_virtual_stages > 1
        self._source_class = BothEndsSource if has_both_ends else BatchSource
        self.micro_batches = micro_batches
        self.nominal_weight = 1.0
        self.mean_num_micro_batches: float | None = None
        self.agrees_on_data = True
        self.on_micro_batch: Callable[[int], None] | None = None
        self.on_action: Callable[[Action], None] | None = None
        self.on_loss: Callable[[torch.Tensor], None] | None = None
        self.means: MeanLosses | None = None
        self.agg_train_loss: torch.Tensor | None = None
        self.agg_additional_losses: dict[str, torch.Tensor] | None = None
        self.grad_norm: float | torch.Tensor | None = None
        self.data_iterator: Iterator[Any] | None = None
        self.batch_fn: BatchFn | None = getattr(module, "_megatron_batch_fn", None)
        self.settings = settings
        self.report: Report = NoReport() if report is None else report
        self._recompute: Recompute = NoRecompute() if recompute is None else recompute
        self._has_logged_split = False
        self._has_pending_gradients = False
        if gradients is None and optimizer is not None:
            gradients = getattr(optimizer, "gradient_source", None) or OptimizerGradients(optimizer)
        if update is None and optimizer is not None:
            update = OptimizerUpdate(
                optimizer, module.parameters(), lambda: self.clip_gradients(settings.gradient_clipping)
            )
        self._gradients, self._update = gradients, update
        self._plan = build.make_plan(module, grid, settings)
        self._reducer = build.make_bucket_reducer(module, grid, device, gradients, settings)
        self._initially_trainable = frozenset(self._trainable_parameters())
        self._stage = build.make_stage(module, grid, device, settings, self._recompute)
        links = self._stage.communicator.links
        self._world_group = dist.group.WORLD if world_group is None else world_group
        self._data_agreement = build.make_data_agreement(
            grid, links, self._world_group, names.ranks, settings.checks_data
        )
        self._monitor = EngineMonitor(
            self, self._stage, self._plan, grid, settings, names, self._world_group, micro_batches
        )

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train on one global batch and return its mean loss, which is equal on every rank. Collective.

        Every rank starts the same collectives in the same order: the data-parallel all-reduces that the backward has
        not started yet, the all-reduce of the losses, then the all-reduces of tied weights' gradients. The rank then
        waits for all of them, before it checks the loss and calls ``on_loss``, so that no message is in flight if one
        of these raises.

        Args:
            data_iter: yields ``micro_batches`` micro-batches on the ranks of the first and last stage that read data.
                None on all other ranks, or to continue with the previous iterator.

        Raises:
            RuntimeError: gradients are disabled, a peer is gone, or there is no data or no optimizer.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch needs gradients, which are disabled. Use eval_batch under no_grad")
        if data_iter is not None and data_iter is not self.data_iterator:
            self.set_dataiterator(data_iter)
        self.module.train()
        if self._has_pending_gradients:
            self._discard_gradients()
        step = 0 if self._update is None else self._update.num_steps
        with self.report.step(), self._monitor.step(step, self.micro_batches):
            # 1. Forwards and backwards in the order of the schedule.
            call = self._make_training_call()
            self._stage.communicator.set_limits(*self._plan.message_limits(self.micro_batches))
            with self._discarding_gradients_on_error():
                self._stage.run(self._plan.training_actions(self.micro_batches), call)
            if self._stage.has_deferred_weights and not self._has_logged_split:
                self._log_split_layers()

            # 2. All-reduce of the losses.
            gradients, reducer = self._gradients, call.reducer
            if gradients is None:
                raise RuntimeError(
                    "train_batch needs an optimizer. Pass one to initialize, or configure one in the JSON"
                )
            if reducer is not None:
                reducer.start_remaining()
            losses = self._reduce_losses(call.meter)
            call.source.read_ahead()

            # 3. All-reduce of the gradients: over the copies of tied weights, then over the replicas.
            operation = "all-reducing the gradients of tied weights and replicas"
            with collective_scope(self.stage_id, operation), self.report.time_phase(REDUCTION):
                is_scattered = reducer is not None and reducer.is_scattered
                if not is_scattered:
                    self._reduce_tied(gradients)
                if gradients.scales_in_step:
                    if self.grid.data_parallel_size > 1:
                        self._reduce_over_replicas(gradients, reducer, 1.0)
                    if is_scattered:  # each replica now has only its shards, so stages exchange fewer bytes
                        self._reduce_tied(gradients)
                    read_with_norm(self.optimizer, losses)
                else:
                    factor = losses.factor if is_host(self.device) else losses.factor_on_device
                    self._reduce_over_replicas(gradients, reducer, factor)
            with self._discarding_gradients_on_error():
                call.source.end(call.meter.num_micro_batches)
                self.means = means = losses.means()
                if self.on_loss is not None:
                    self.on_loss(means.loss)

            # 4. Update.
            self._step_optimizer(gradients)
            self.agg_train_loss, self.agg_additional_losses = means.loss, means.additional or None
            self.report.write_training(means)
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the mean loss over one global batch without training on it. Collective.

        If the model has several named losses, the result is a dict of their means. Random number states and the state
        of training are restored afterwards.

        Args:
            data_iter: yields the micro-batches on the ranks that read data; None on all other ranks.
            return_logits: return (loss, output of the last micro-batch); the output is None except on the last stage.
            compute_loss: False: return the model's outputs instead; with reduce_output="avg", the mean of each output
                tensor.
            reduce_output: "avg", or None for a list with one entry per micro-batch.
            bcast_loss: return the loss on every stage; otherwise the last stage returns it and the others return None.
            num_micro_batches: number of micro-batches to read; None: ``micro_batches``.
        """
        num_read = self.micro_batches if num_micro_batches is None else num_micro_batches
        check_arguments(reduce_output, num_read)
        call = Call(
            source=self._make_source(data_iter if self._reads_data() else None),
            is_training=False,
            meter=self._make_meter(num_read),
            loss_fn=self.module.loss_fn,
            on_action=self.on_action,
            collects_losses=compute_loss,
        )
        is_last = self.is_last_stage()
        preserving = self._recompute.preserving_state(self.module)
        watching = self._monitor.watching("in eval_batch")
        with watching, preserving, preserve_rng_states(self.device), torch.no_grad():
            self.module.eval()
            self._stage.communicator.set_limits(*self._plan.message_limits(num_read, is_training=False))
            self._stage.run(self._plan.evaluation_actions(num_read), call)
            call.source.end(num_read)
            result: Any = None
            if compute_loss:
                self.means = means = self._reduce_losses(call.meter).means()
                self.report.write_evaluation(means)
                if reduce_output is None:
                    result = call.outputs if is_last else None
                elif bcast_loss or is_last:
                    result = means.loss if len(means.loss_fn_losses) == 1 else means.loss_fn_losses
            elif is_last:
                result = call.outputs if reduce_output is None else mean_output(call.outputs, self.grid)
            output = self._stage.made_output(call.last_output) if return_logits else None
        return (result, output) if return_logits else result

    def bubble(self) -> float | None:
        """Return the idle fraction in the training steps since the last call. Collective over the pipeline.

        Returns None if there was no step.
        """
        return self._monitor.bubble()

    def step_times(self, reader: str = "program") -> list[Row]:
        """Return (start, end, time spent waiting for messages) in ns per training step since the reader's last call.

        At most the last 1,000 steps are returned. Readers are independent of each other and of ``bubble``.
        """
        return self._monitor.step_times(reader)

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Return the mean additional losses in the last ``train_batch``, by name; None if there is none."""
        return self.agg_additional_losses

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Read training data from ``iterator`` from now on."""
        if self._reads_data():
            self.training_dataloader: Any = None
            self.data_iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Read training data from ``loader`` from now on."""
        if self._reads_data():
            self.training_dataloader = loader
            self.data_iterator = iter(loader)

    def set_batch_fn(self, fn: BatchFn | None) -> None:
        """Set the function that converts an item of the data iterator to (inputs, labels).

        On a rank without an iterator, the function is called with None.
        """
        self.batch_fn = fn

    def set_schedule(self, schedule: Any) -> None:
        """Train with another schedule from the next step on. Every rank must set the same schedule.

        Args:
            schedule: a name ("1f1b", "gpipe", "zb-h1", "interleaved"; "zb-v" or "dualpipev" for the placement "v"), or
                a function that maps (number of stages, number of micro-batches, stage) to the list of that stage's
                actions (``tds.schedule``). A function is validated before its first use.
        """
        self._plan.set_schedule(schedule)
        self._monitor.keep_schedule()

    def set_wait_limit(self, limit_s: float) -> None:
        """Set the timeout of all further messages and collectives of this rank to ``limit_s`` seconds.

        For phases of a program that are expected to be slow, such as the first step. Must be equal on every rank.
        """
        limit = timedelta(seconds=limit_s)
        links = self._stage.communicator.links
        set_group_timeouts({*self._groups(), *links.groups.values()}, limit)
        links.timeout = limit
        self._monitor.watchdog.limit_s = limit_s

    let_watch = Renamed("stop_watchdog")

    def stop_watchdog(self) -> P2PCommunicator:
        """Stop the engine's watchdog, for a program that has its own watchdog.

        Returns:
            The communicator. Its ``action``, ``waiting``, ``waits`` and ``history`` describe this rank's current
            operation.
        """
        self._monitor.watchdog.close()
        return self._stage.communicator

    def set_input_grad(self, values: Sequence[bool] | None) -> None:
        """Declare for which of the tensors sent between stages a gradient is sent back, from the next call on."""
        boundary.set_list(self.module, "_input_grad", values)

    def set_input_type(self, values: Sequence[Any] | None) -> None:
        """Declare the types ("float", "int", "bool" or a dtype) of the tensors sent between stages."""
        boundary.set_list(self.module, "_input_type", values)

    def set_input_pipe_partitioned(self, values: Sequence[bool] | None) -> None:
        """Declare which of the tensors sent between stages are sharded over the tensor group in transit."""
        boundary.set_list(self.module, "_input_pipe_partitioned", values)

    def is_first_stage(self) -> bool:
        """Return True on the stage that reads the inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Return True on the stage that computes the loss; with the placement "v" this is stage 0."""
        return self.stage_id == self.loss_stage

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> None:
        """Clip the gradients and record their norm, unless the optimizer clips them itself. Collective."""
        gradients = self._gradients
        if gradients is None or gradients.clips_in_step:
            return
        parameters, tensor_rank = self._trainable_parameters(), self.grid.get_slice_parallel_rank()
        counted_grads = [gradients.gradient_of(p) for p in parameters if is_counted_in_norm(p, tensor_rank)]
        with collective_scope(self.stage_id, "computing the norm of the gradients"):
            norm = global_norm(counted_grads, [self.grid.get_model_parallel_group()], self.device)
        clip([gradients.gradient_of(p) for p in parameters], norm, max_norm)
        self.grad_norm = float(norm) if is_host(norm.device) else norm  # stays on the device until it is read

    def close(self) -> None:
        """Draw the trace now instead of at the program's end."""
        self._monitor.close()

    def _make_training_call(self) -> Call:
        if self._gradients is not None and not self._gradients.supports_unfreezing:
            self._check_unfrozen(self._initially_trainable)
        if self._reducer is not None:
            self._reducer.reset()
        return Call(
            source=self._make_source(self.data_iterator),
            is_training=True,
            meter=self._make_meter(self.micro_batches),
            loss_fn=self.module.loss_fn,
            gradients=self._gradients,
            reducer=self._reducer,
            loss_scale=1.0 if self._gradients is None else self._gradients.loss_scale(),
            on_micro_batch=self.on_micro_batch,
            on_action=self.on_action,
            time_phase=self.report.time_phase,
            recomputes_reentrantly=self._recompute.is_reentrant(self.module),
        )

    def _make_source(self, iterator: Iterator[Any] | None) -> BatchSource:
        should_agree = self.agrees_on_data or self.settings.checks_data
        return self._source_class(
            iterator, self.batch_fn, self.stage_id, self._data_agreement if should_agree else None
        )

    def _make_meter(self, num_micro_batches: int) -> LossMeter:
        get_additional_losses = self.module.get_additional_losses
        return LossMeter(
            num_micro_batches, self.nominal_weight, self.device, get_additional_losses, self.mean_num_micro_batches
        )

    def _reads_data(self) -> bool:
        return self.is_first_stage() or self.is_last_stage()

    def _log_split_layers(self) -> None:
        """Log once, on one rank per stage, the fraction of deferred weight gradients."""
        self._has_logged_split = True
        if self.grid.get_data_parallel_rank() == 0 and self.grid.get_slice_parallel_rank() == 0:
            description = self._stage.splitter.describe_split(dict(self.module.named_parameters()))
            log_rank_0(f"{self._plan.name}, stage {self.stage_id}: {description}")

    def _reduce_losses(self, meter: LossMeter) -> LossReduction:
        """All-reduce the losses over the replicas and broadcast them to all stages. Collective."""
        grid = self.grid
        with collective_scope(self.stage_id, "all-reducing the loss"):
            return all_reduce_loss(
                meter if self.is_last_stage() else None,
                self.device,
                data_group=grid.get_data_parallel_group(),
                data_size=grid.data_parallel_size,
                pipe_group=grid.get_pipe_parallel_group(),
                pipe_size=grid.pipe_parallel_size,
                last_rank=grid.stage_to_global(self.loss_stage),
            )

    def _reduce_tied(self, gradients: GradientSource) -> None:
        """Sum the gradients of the copies of each tied weight on this replica. Collective."""
        reduce_tied_gradients(
            self.module.get_tied_weights_and_groups(), gradients.gradient_of, self.settings.grad_reduce_dtype
        )

    def _reduce_over_replicas(
        self, gradients: GradientSource, reducer: BucketReducer | None, factor: float | torch.Tensor
    ) -> None:
        """Replace each gradient by its sum over the replicas times ``factor``, and wait for the result. Collective."""
        if reducer is not None:
            reducer.finish(factor)
            return
        data_group = self.grid.get_data_parallel_group() if self.grid.data_parallel_size > 1 else None
        reduce_gradients([gradients.gradient_of(p) for p in self._trainable_parameters()], data_group, factor)

    def _step_optimizer(self, gradients: GradientSource) -> None:
        """Clip the complete gradients, update the weights and count the step. Collective."""
        if self._update is None:
            raise RuntimeError("train_batch needs an optimizer. Pass one to initialize, or configure one in the JSON")
        scale = gradients.loss_scale()
        self._has_pending_gradients = True  # kept for inspection after an error; the next batch discards them
        with self.report.time_phase(STEP):
            gradients.before_step()
            self._update.step()
        self._has_pending_gradients = False
        gradients.after_step()
        if gradients.norm_is_scaled and self.grad_norm is not None:
            self.grad_norm = float(self.grad_norm) / scale

    @contextmanager
    def _discarding_gradients_on_error(self) -> Iterator[None]:
        """Discard gradients if the block raises, so that the next batch does not accumulate into them."""
        try:
            yield
        except BaseException:
            self._discard_gradients()
            raise

    def _discard_gradients(self) -> None:
        """Drop the gradients after a batch that ended without an update."""
        if self._update is not None:
            self._update.zero_grad()
        if self._gradients is not None:
            self._gradients.discard()
        self._has_pending_gradients = False

    def _trainable_parameters(self) -> list[torch.nn.Parameter]:
        """List this stage's trainable parameters in module order."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def _groups(self) -> Collection[Any]:
        """Return the process groups whose timeout ``set_wait_limit`` changes, except the message groups."""
        grid = self.grid
        groups = [grid.get_pipe_parallel_group(), grid.get_data_parallel_group(), grid.get_model_parallel_group()]
        groups += [self._world_group, *(group for weight, group in self.module.get_tied_weights_and_groups())]
        return [group for group in groups if isinstance(group, dist.ProcessGroup)]

    def _check_unfrozen(self, trainable_at_start: Collection[torch.nn.Parameter]) -> None:
        """Raise RuntimeError if a weight was unfrozen too late for DeepSpeed's optimizer to update it.

        Args:
            trainable_at_start: the parameters that were trainable when the optimizer copied them into its buffers.
        """
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter not in trainable_at_start:
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} only updates parameters that are trainable when tds.initialize "
                    "is "
                    f"called, but {name} was unfrozen later. Unfreeze it before tds.initialize (a separate parameter "
                    "group with a learning rate of 0 keeps it unchanged), or save a checkpoint and load it into a new "
                    "engine"
                )
