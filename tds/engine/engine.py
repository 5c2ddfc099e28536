"""PipelineEngine: train_batch from the schedule to the optimizer step, eval_batch, setters: DeepSpeed's interface."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from tds.bubble_timer import Row
from tds.deepspeed.api import BaseEngine, PipelineError, grid_of, limit_waits
from tds.deepspeed.checkpointing import LayerCheckpoints
from tds.deepspeed.training_loader import training_loader
from tds.device import is_host, keep_freed
from tds.engine import build, evaluate, pipeline_json, step_report
from tds.engine.engine_parts import EngineParts
from tds.engine.evaluate import agree
from tds.engine.micro_batches import BatchSource, BothEndsSource
from tds.engine.monitor import EngineMonitor
from tds.engine.recompute import recomputes_reentrantly
from tds.engine.stage_call import Call
from tds.engine.step_report import REDUCTION, STEP, StepReport
from tds.grad_norm import clip, global_norm, is_counted_in_norm
from tds.gradient_reducer import GradientReducer
from tds.gradients import GradientSource, reduce_gradients, sum_tied
from tds.log import log_rank_0
from tds.loss import LossMeter
from tds.loss_reduction import MeanLosses, read_with_norm
from tds.p2p import boundary
from tds.p2p.collective_scope import collective_scope
from tds.p2p.communicator import P2PCommunicator
from tds.schedule import Action
from tds.torch_api import default_timeout

# What follows the last backward: the loss of all replicas, the sums of gradients, the optimizer's step.


def finish(
    engine: EngineParts, meter: LossMeter, gradients: GradientSource | None, reducer: GradientReducer | None = None,
    source: BatchSource | None = None,
) -> torch.Tensor:  # fmt: skip
    """Reduce, step, and return the mean loss of the global batch; others go to ``engine.agg_additional_losses``.

    Collective. Every rank runs the same in the same order: the sums over replicas that the backward has not started
    yet, the losses, the sums of tied weights, the wait for all sums. Only then may ``on_loss`` or what is wrong with
    the losses raise: nothing is in flight.

    Args:
        reducer: sums over replicas, some of them under way; None to start and await them here.
        source: where the micro-batches came from; it may raise where ``on_loss`` may.
    """
    if gradients is None:
        raise RuntimeError("train_batch needs an optimizer; pass one to initialize or name one in the JSON")
    if reducer is not None:
        reducer.finish_launch()
    agreement = agree(engine, meter)
    if source is not None:
        source.read_ahead()
    doing = "adding up the gradients of tied weights and replicas"
    with collective_scope(engine.stage_id, doing), engine.report.part(REDUCTION):
        leaves_parts = reducer is not None and reducer.is_scattered
        if not leaves_parts:
            add_up_tied(engine, gradients)
        if gradients.are_multiplied_in_step:
            if engine.grid.data_parallel_size > 1:
                add_up_replicas(engine, gradients, reducer, 1.0)
            if leaves_parts:  # of which each replica then has its own alone: less to send between stages
                add_up_tied(engine, gradients)
            read_with_norm(engine.optimizer, agreement)
        else:
            is_here = is_host(torch.device(engine.device))
            add_up_replicas(engine, gradients, reducer, agreement.factor if is_here else agreement.factor_on_device)
    with discarding_gradients_on_error(engine, gradients):
        if source is not None:
            source.end(meter.num_micro_batches)
        engine.means = means = agreement.means()
        if engine.on_loss is not None:
            engine.on_loss(means.loss)
    take_step(engine, gradients)
    engine.agg_train_loss, engine.agg_additional_losses = means.loss, means.additional or None
    if engine.monitor.enabled:
        step_report.write_training(engine, means)
    return engine.agg_train_loss


def add_up_tied(engine: EngineParts, gradients: GradientSource) -> None:
    """Give each copy of a tied weight the gradient of all, on this replica; ahead of the replicas' sum. Collective."""
    sum_tied(engine.module.get_tied_weights_and_groups(), gradients.of, engine.sums_dtype)


def add_up_replicas(
    engine: EngineParts, gradients: GradientSource, reducer: GradientReducer | None, factor: float | torch.Tensor
) -> None:
    """Replace each gradient by the sum over the replicas times ``factor``; await what is under way. Collective."""
    if reducer is not None:
        reducer.finish(factor)
        return
    data_group = engine.grid.get_data_parallel_group() if engine.grid.data_parallel_size > 1 else None
    reduce_gradients([gradients.of(p) for p in trained(engine)], data_group, factor)


def take_step(engine: EngineParts, gradients: GradientSource) -> None:
    """Let DeepSpeed clip, step and count, with gradients as they are to be. Collective."""
    scale = gradients.loss_scale()
    engine._force_grad_boundary = True
    engine._has_untaken_gradients = True  # after an error they may still be looked at; the next batch drops them
    try:
        with engine.report.part(STEP):
            gradients.before_step()
            engine.take_model_step()
    finally:
        engine._force_grad_boundary = False
    engine._has_untaken_gradients = False
    gradients.after_step()
    if gradients.norm_is_scaled:
        engine.grad_norm = float(engine.grad_norm) / scale


@contextmanager
def discarding_gradients_on_error(engine: EngineParts, gradients: GradientSource | None) -> Iterator[None]:
    """Let an error within leave no gradients behind, which the next batch would add to."""
    try:
        yield
    except BaseException:
        forget(engine, gradients)
        raise


def forget(engine: EngineParts, gradients: GradientSource | None) -> None:
    """Drop the gradients of a batch that took no step."""
    engine.zero_grad()
    if gradients is not None:
        gradients.forget()
    engine._has_untaken_gradients = False


def trained(engine: EngineParts) -> list[torch.nn.Parameter]:
    """Return this stage's parameters that have gradients, in the order of the module."""
    return [p for p in engine.module.parameters() if p.requires_grad]


def refuse_unfrozen(engine: EngineParts, known: Collection[torch.nn.Parameter]) -> None:
    """Raise where a weight has been unfrozen that DeepSpeed's optimizer would never update.

    Args:
        known: the parameters that were trained when the optimizer put them into buffers of its own.
    """
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and parameter not in known:
            raise RuntimeError(
                f"{type(engine.optimizer).__name__} updates only what is trained when tds.initialize is called, got "
                f"{name}, which was unfrozen since. Unfreeze it ahead of tds.initialize (a learning rate of 0 in a "
                "parameter group of its own keeps it as it is), or save, and load into a new engine"
            )


@torch.no_grad()
def clip_gradients(engine: EngineParts, gradients: GradientSource | None) -> None:
    """Clip to the JSON's gradient_clipping and record the norm, unless the optimizer does so itself. Collective."""
    if gradients is None or gradients.clips_itself:
        return
    parameters = trained(engine)
    tensor_rank = engine.grid.get_slice_parallel_rank()
    counted = [gradients.of(p) for p in parameters if is_counted_in_norm(p, tensor_rank)]
    with collective_scope(engine.stage_id, "taking the norm of the gradients"):
        norm = global_norm(counted, [engine.grid.get_model_parallel_group()], engine.device)
    clip([gradients.of(p) for p in parameters], norm, engine.gradient_clipping())
    engine.grad_norm = float(norm) if is_host(norm.device) else norm  # read once it is asked for


# Public names of DeepSpeed's pipeline engine that ours has no use for and programs read or call all the same.


class DeepSpeedAttributes:
    """The part of the engine that is there for programs written for DeepSpeed's."""

    module: Any
    grid: Any
    stage_id: int
    micro_batch_size: int

    @property
    def prev_stage(self) -> int:
        """The stage ahead of this one; -1 on the first."""
        return self.stage_id - 1

    @property
    def next_stage(self) -> int:
        """The stage after this one; the number of stages on the last."""
        return self.stage_id + 1

    @property
    def is_pipe_parallel(self) -> bool:
        """True with more than one stage."""
        return self.grid.pipe_parallel_size > 1

    @property
    def is_data_parallel(self) -> bool:
        """True with more than one replica."""
        return self.grid.data_parallel_size > 1

    @property
    def is_model_parallel(self) -> bool:
        """True if layers are cut over a tensor group."""
        return self.grid.model_parallel_size > 1

    def _reentrant_activation_checkpointing(self) -> bool:
        """True if recompute needs the first stage's float inputs to require a gradient."""
        return recomputes_reentrantly(self.module)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the global batch size by another size of each micro-batch, which the data must have."""
        super().set_train_micro_batch_size(micro_batch_size)  # type: ignore[misc]  # DeepSpeed's engine has it
        self.micro_batch_size = micro_batch_size

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: boolean tensors cross a stage as they are, wherever they stand."""


# The pipeline engine: DeepSpeed's interface on schedules as data.


class PipelineEngine(LayerCheckpoints, DeepSpeedAttributes, BaseEngine):
    """Trains a ``PipelineModule``: ``train_batch`` runs a schedule of forwards and backwards and one step.

    ``tds.initialize`` makes it. Attributes that a program may set:

        nominal_weight    power of two by which losses given as ``tds.Weighted`` are divided in the backward; about the
                          number of tokens of a micro-batch keeps 16-bit gradients in range
        mean_micro_batches
                          micro-batches of a replica on the mean, where replicas have unequal numbers of them; None: as
                          many as here
        on_micro_batch    called with the micro-batch's index ahead of each forward in training
        on_action         called with each action of a call ahead of it, in training and in evaluation
        agrees_on_data    False: leave out the small messages ahead of and behind each call by which all ranks learn of
                          a loader that ends early; for a program whose loaders have no end. The same on every rank
        on_loss           called with the mean loss, the same on every rank, ahead of the optimizer's step; may raise.
                          ``means.numbers`` has it, and all others, as numbers of the host by then
    """

    def __init__(self, has_bool_tensors: bool = False, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.enable_backward_allreduce = False
        if is_host(torch.device(self.device)):
            keep_freed()
        self.grid = grid_of(self.module)
        self.global_rank = self.grid.get_global_rank()
        self.num_stages = self.grid.pipe_parallel_size
        self.stage_id = self.grid.get_stage_id()
        placement = build.placement_of(self.module, self.num_stages)
        self.loss_stage = placement.last_stage
        has_both_ends = self.loss_stage == 0 and placement.num_pieces > 1
        self._source_class = BothEndsSource if has_both_ends else BatchSource
        self.micro_batch_size = self.train_micro_batch_size_per_gpu()
        self.micro_batches = self.gradient_accumulation_steps()
        self.nominal_weight = 1.0
        self.mean_micro_batches: float | None = None
        self.agrees_on_data = True
        self._compares_data = pipeline_json.compares_data(self.pipeline_section)
        self.on_micro_batch: Callable[[int], None] | None = None
        self.on_action: Callable[[Action], None] | None = None
        self.on_loss: Callable[[torch.Tensor], None] | None = None
        self.means: MeanLosses | None = None
        self.agg_train_loss: torch.Tensor | None = None
        self.agg_additional_losses: dict[str, torch.Tensor] | None = None
        self.data_iterator: Iterator[Any] | None = None
        self.batch_fn: Callable[[Any], Any] | None = getattr(self.module, "_megatron_batch_fn", None)
        self._force_grad_boundary = False
        self._has_logged_split = False
        self.report = StepReport(self, lambda: self._seeing.bubble("report"))
        limit_waits(self.module, pipeline_json.wait_limit(self.pipeline_section, default_timeout()))
        build.refuse_unsupported(self)
        pipeline_json.check_keys(self.pipeline_section)
        build.log_unused_settings(self)
        build.configure_recompute(self)
        self._plan = build.make_plan(self)
        self._gradients = build.make_gradients(self)
        self._reducer = build.make_reducer(self, self._gradients)
        self._trained_at_start = frozenset(trained(self))
        self._has_untaken_gradients = False
        self._stage = build.make_stage(self)
        self._data_agreement = build.make_data_agreement(self, self._stage.exchange.links, self._compares_data)
        self._seeing = EngineMonitor(self, self._stage, self._plan)
        if self.training_data and self._reads_data():
            has_curriculum = self.curriculum_learning_enabled()
            loader = training_loader(self.training_data, self.grid, self.deepspeed_io, has_curriculum=has_curriculum)
            self.set_dataloader(loader)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train on one global batch and return its mean loss, the same on every rank. Collective.

        Args:
            data_iter: gives ``gradient_accumulation_steps`` micro-batches on the ranks of the first and last stage
                that read data; None elsewhere, or to go on with the last one.

        Raises:
            RuntimeError: gradients are switched off, a peer is gone, or there is no data.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch needs gradients, which are switched off here; use eval_batch under no_grad")
        if data_iter is not None and data_iter is not self.data_iterator:
            self.set_dataiterator(data_iter)
        self.module.train()
        if self._has_untaken_gradients:
            forget(self, self._gradients)
        with self.report.step(), self._seeing.step():
            call = self._training_call()
            self._stage.exchange.set_limits(*self._plan.limits(self.micro_batches))
            with discarding_gradients_on_error(self, self._gradients):
                self._stage.run(self._plan.training(self.micro_batches), call)
            if self._stage.splits and not self._has_logged_split:
                self._log_split_layers()
            loss = finish(self, call.meter, self._gradients, call.reducer, call.source)
        self.micro_steps += self.micro_batches
        return loss

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

        With several named losses the mean of each, by name. Random numbers and the state of training are as before
        afterwards.

        Args:
            return_logits: return (loss, output of the last micro-batch); the output is None but on the last stage.
            compute_loss: False: return the model's outputs; with reduce_output="avg" their means, tensor by tensor.
            reduce_output: "avg", or None for a list with one entry for each micro-batch.
            bcast_loss: give the loss to every stage; else only the last stage has it, the others None.
            num_micro_batches: read this many instead of ``gradient_accumulation_steps``.
        """
        number = self.micro_batches if num_micro_batches is None else num_micro_batches
        evaluate.check_arguments(reduce_output, number)
        call = self._evaluation_call(data_iter, number, compute_loss)
        watching = self._seeing.watching("in eval_batch")
        with watching, evaluate.preserve_training_state(self.module, self.device), torch.no_grad():
            self.module.eval()
            self._stage.exchange.set_limits(*self._plan.limits(number, is_training=False))
            self._stage.run(self._plan.evaluation(number), call)
            call.source.end(number)
            result = evaluate.evaluation_result(self, call, compute_loss, reduce_output, bcast_loss)
            shown = self._stage.made_output(call.last_output) if return_logits else None
        return (result, shown) if return_logits else result

    def bubble(self) -> float | None:
        """Return the share of idle time in the training steps since the last call. Collective over the pipeline.

        None if there was no step.
        """
        return self._seeing.bubble()

    def rows_of_steps(self, reader: str = "program") -> list[Row]:
        """Return (began, ended, waited for messages) in ns, of the training steps since the reader's last call.

        Of the last 1,000 at most. Readers do not know of each other, nor of ``bubble``.
        """
        return self._seeing.rows(reader)

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Return the means of the last train_batch's other named losses by name, on every rank; None without."""
        return self.agg_additional_losses

    def _training_call(self) -> Call:
        if self._gradients is not None and not self._gradients.takes_unfrozen:
            refuse_unfrozen(self, self._trained_at_start)
        if self._reducer is not None:
            self._reducer.reset()
        return Call(
            source=self._source(self.data_iterator),
            is_training=True,
            meter=self._meter(self.micro_batches),
            loss_fn=self.module.loss_fn,
            gradients=self._gradients,
            reducer=self._reducer,
            loss_scale=1.0 if self._gradients is None else self._gradients.loss_scale(),
            on_micro_batch=self.on_micro_batch,
            on_action=self.on_action,
            part=self.report.part,
            recomputes_reentrantly=self.module.activation_checkpoint_interval > 0
            and recomputes_reentrantly(self.module),
        )

    def _evaluation_call(self, data_iter: Iterator[Any] | None, number: int, compute_loss: bool) -> Call:
        return Call(
            source=self._source(data_iter if self._reads_data() else None),
            is_training=False,
            meter=self._meter(number),
            loss_fn=self.module.loss_fn,
            on_action=self.on_action,
            collects_losses=compute_loss,
        )

    def _source(self, iterator: Iterator[Any] | None) -> BatchSource:
        is_asked = self.agrees_on_data or self._compares_data
        return self._source_class(iterator, self.batch_fn, self.stage_id, self._data_agreement if is_asked else None)

    def _log_split_layers(self) -> None:
        """Say once, on one rank of each stage, whose backward a schedule could split."""
        self._has_logged_split = True
        if self.grid.get_data_parallel_rank() == 0 and self.grid.get_slice_parallel_rank() == 0:
            description = self._stage.splitter.describe_split(dict(self.module.named_parameters()))
            log_rank_0(f"{self._plan.name}, stage {self.stage_id}: {description}")

    def _meter(self, num_micro_batches: int) -> LossMeter:
        more = self.module.get_additional_losses
        return LossMeter(num_micro_batches, self.nominal_weight, self.device, more, self.mean_micro_batches)

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Read training data from ``iterator`` from now on."""
        if self._reads_data():
            self.training_dataloader = None
            self.data_iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Read training data from ``loader`` from now on."""
        if self._reads_data():
            self.training_dataloader = loader
            self.data_iterator = iter(loader)

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Make (inputs, labels) from what the iterator gives by ``fn``; called with None where nothing is read."""
        self.batch_fn = fn

    def set_schedule(self, schedule: Any) -> None:
        """Train by another schedule from now on; the same on every rank.

        Args:
            schedule: a name ("1f1b", "gpipe", "zb-h1", "interleaved", in a V "zb-v", "dualpipev"), or a function of
                (stages, micro-batches, stage) to the list of that stage's actions (``tds.schedule``), which is proven
                to run before it is used.
        """
        self._plan.set(schedule)
        self._seeing.keep_schedule()

    def set_wait_limit(self, limit_s: float) -> None:
        """Let this rank wait for others for ``limit_s`` seconds at most from now on, in messages and collectives.

        For phases of a program that are slow for a reason, such as the first step; the same on every rank.
        """
        limit = timedelta(seconds=limit_s)
        links = self._stage.exchange.links
        limit_waits(self.module, limit, links.groups.values())
        links.timeout = limit
        self._seeing.watchdog.limit_s = limit_s

    def let_watch(self) -> P2PCommunicator:
        """Stop the engine's own watchdog for a program that watches all of itself; return where it sees what this
        rank is at: ``action``, ``waiting``, ``waits``, ``history``."""
        self._seeing.watchdog.close()
        return self._stage.exchange

    def set_input_grad(self, values: Sequence[bool] | None) -> None:
        """Declare which of the tensors that cross a stage have a gradient, from the next call on."""
        boundary.set_list(self.module, "_input_grad", values)

    def set_input_type(self, values: Sequence[Any] | None) -> None:
        """Declare the types ("float", "int", "bool" or a dtype) of the tensors that cross a stage."""
        boundary.set_list(self.module, "_input_type", values)

    def set_input_pipe_partitioned(self, values: Sequence[bool] | None) -> None:
        """Declare which of the tensors that cross a stage are cut over the tensor group while they travel."""
        boundary.set_list(self.module, "_input_pipe_partitioned", values)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size by another number of micro-batches; raises ValueError if it does not divide."""
        super().set_train_batch_size(train_batch_size)
        self.micro_batches = self.gradient_accumulation_steps()

    def reset_activation_shape(self) -> None:
        """Do nothing: each call announces its shapes anew. Kept for programs that call it."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """True while the optimizer's step runs."""
        return self._force_grad_boundary

    def flops_profiler_enabled(self) -> bool:
        """False, whatever the JSON says: the profiler would begin with each forward and never end."""
        return False

    def is_first_stage(self) -> bool:
        """True on the stage that reads the inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """True on the stage that has the loss; in a V that is the first one, too."""
        return self.stage_id == self.loss_stage

    def get_pipeline_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self.stage_id

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm over all stages and slices; DeepSpeed's step calls this where nobody else clips."""
        clip_gradients(self, self._gradients)

    def destroy(self) -> None:
        """Let go of what the engine holds; a trace is drawn now rather than when the program ends."""
        if hasattr(self, "_seeing"):
            self._seeing.close()
        super().destroy()

    def forward(self, *_: Any, **__: Any) -> Any:
        raise PipelineError("a pipeline engine has no forward(): use train_batch(data_iter) or eval_batch(data_iter)")

    def backward(self, *_: Any, **__: Any) -> Any:
        raise PipelineError("a pipeline engine has no backward(): train_batch(data_iter) runs it")

    def step(self, *_: Any, **__: Any) -> Any:
        raise PipelineError("a pipeline engine has no step(): train_batch(data_iter) takes it")

    def _reads_data(self) -> bool:
        return self.is_first_stage() or self.is_last_stage()
