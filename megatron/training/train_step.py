"""One optimizer step and one evaluation on either engine (SingleStageEngine, PipelineStepEngine); StepResult."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron.config.batch import Share, share_of
from megatron.errors import DataError, NumericsError
from megatron.models.common.router import ExpertLoad, Routers
from megatron.mpu.groups import Grid
from megatron.mpu.random import DropoutKey, DropoutStreams
from megatron.optim import MixedPrecisionOptimizer
from tds import reduce_gradients
from tds.device import random_numbers_kept
from tds.engine.micro_batches import DataDisagreement, read_ahead
from tds.gradients import is_reduced_apart
from tds.loss import (
    LossMeter,
    LossReduction,
    MeanLosses,
    Weighted,
    all_reduce_loss,
    has_loss_function,
    is_weighted,
    named_losses,
    read_with_norm,
)
from tds.timers import BubbleTimer, Row, clock_for

# What an optimizer step gave, and the error of one whose loss is not finite.


@dataclass
class StepResult:
    """What one optimizer step gave, the same on every rank.

    ``is_skipped``: the weights are as before. ``is_refused``: because whoever judges steps said so, not for an overflow
    of fp16. ``problem``: what the guard found wrong with the step, in words. ``expert_load``: of a model with experts.
    """

    loss: float
    grad_norm: float
    loss_scale: float
    is_skipped: bool
    losses: dict[str, float] = field(default_factory=dict)
    is_refused: bool = False
    problem: str | None = None
    expert_load: ExpertLoad | None = None

    @property
    def is_bad(self) -> bool:
        """Whether the guard found something wrong with the step."""
        return self.problem is not None

    @property
    def is_overflow(self) -> bool:
        """True where fp16 has overflowed and a smaller loss scale may cure that."""
        return self.is_skipped and not self.is_refused


class LossError(NumericsError):
    """The loss, and not only a gradient, is not finite."""


class ModuleError(NumericsError):
    """A number that is not finite, with the module that made it.

    ``found`` says so in words; "" where another rank holds the module.
    """

    def __init__(self, text: str, found: str) -> None:
        super().__init__(text)
        self.found = found


class FiniteLossCheck:
    """Ends a run whose loss or gradient norm is not finite: the judge of ``optimizer`` until it gets another.

    It does so in the update, behind all that ranks do together in a step: one that left earlier would leave the others
    waiting.
    """

    def __init__(self, optimizer: MixedPrecisionOptimizer) -> None:
        self._optimizer = optimizer
        self._loss = 0.0
        optimizer.judge = self._allows

    def take_loss(self, loss: float) -> None:
        """Note the mean loss of the step, ahead of its update."""
        self._loss = loss

    def _allows(self, norm: float) -> bool:
        if not math.isfinite(self._loss):
            raise LossError(self._not_finite_text())
        if not math.isfinite(norm):
            raise NumericsError(self._optimizer.not_finite_text(norm))
        return True

    def _not_finite_text(self) -> str:
        gathers = " If it is so from the first step on, weights are read outside of the forward of a module that has "
        gathers += "them, which --zero-stage 3 gathers them for: use --zero-stage 2."
        return (
            f"the loss must be finite, got {self._loss}. The weights are as before this step. Lower --lr, look at "
            "the samples, or leave such steps out with --stability-guard skip."
            + (gathers if self._optimizer.gathers_weights else "")
        )


def result_of(loss: float, losses: dict[str, float], scale: float, optimizer: MixedPrecisionOptimizer) -> StepResult:
    """Return what the step gave that ``optimizer`` has just taken or skipped, with the loss scale it ran with."""
    has_gradients = math.isfinite(loss) or not optimizer.was_refused  # else they were thrown away ahead of the norm
    return StepResult(
        loss=loss,
        grad_norm=optimizer.grad_norm if has_gradients else math.nan,
        loss_scale=scale,
        is_skipped=optimizer.overflow or optimizer.was_refused,
        losses=losses,
        is_refused=optimizer.was_refused,
    )


# Losses in the forms that users of Megatron write, for the engines.


def as_weighted(loss: Any) -> Any:
    """Return a plain pair (sum, count), as users of Megatron write it, as what ``tds`` calls ``Weighted``.

    Of a dictionary of losses each.
    """
    if isinstance(loss, Mapping):
        return {name: as_weighted(each) for name, each in loss.items()}
    is_pair = isinstance(loss, (tuple, list)) and not hasattr(loss, "_fields") and len(loss) == 2
    return Weighted(*loss) if is_pair else loss


def reading_pairs(loss_fn: Callable[[Any, Any], Any] | None) -> Callable[[Any, Any], Any]:
    """Return a loss function that gives what ``loss_fn`` does (None: the output), a plain pair as ``Weighted``."""

    def read(output: Any, labels: Any) -> Any:
        return as_weighted(output if loss_fn is None else loss_fn(output, labels))

    read.is_identity = loss_fn is None  # type: ignore[attr-defined]
    return read


def mean_of_micro_batch(loss: Any) -> Any:
    """Return ``loss`` with the loss to train on as the mean over its micro-batch, for ``--loss-average micro-batch``.

    The engines average such a scalar over the micro-batches of all replicas and context ranks, each with the same
    weight. A micro-batch in which nothing is counted has the mean 0. Losses that are only reported stay as they are.

    Args:
        loss: in a form that a loss function may return, pairs as ``Weighted``.

    Source: Megatron-LM, core/pipeline_parallel/schedules.py, ``forward_step_calc_loss``.
    """
    if isinstance(loss, Weighted):
        count = torch.as_tensor(loss.count, device=loss.total.device)
        return loss.total / count.to(loss.total.dtype).clamp(min=1)
    if isinstance(loss, torch.Tensor):
        return loss
    losses = named_losses(loss, 0)
    trained = next(iter(losses))
    return {**losses, trained: mean_of_micro_batch(losses[trained])}


def scalars(report: dict[str, Any], loss: Any) -> dict[str, torch.Tensor]:
    """Return what is to be averaged of a report: tensors of one element; the loss itself is reported apart."""
    return {
        name: value
        for name, value in report.items()
        if value is not loss and isinstance(value, torch.Tensor) and value.numel() == 1
    }


# One optimizer step and one evaluation, on either engine: DeepSpeed's without a pipeline, ours with one.
#
# Both leave the same thing behind: gradients that are the mean over the valid tokens of the global batch (or over
# micro-batches, for a loss that is a plain scalar and with --loss-average micro-batch), summed over the replicas, then
# one ``optimizer.step()``.

DataIterator = Iterator[Any] | None
ForwardStep = Callable[[DataIterator, Any], tuple[Any, dict[str, Any]]]


class StepEngine(Protocol):
    """What the loop needs of an engine.

    Attributes:
        engine: DeepSpeed's or tds's.
        on_loss: called on every rank with the mean loss of a step, ahead of its update.
        on_activity: called with what the engine is at, ahead of each action of a step.
        micro_losses: of the last step, this rank's own losses (or sums of losses) by micro-batch, on the last stage.
        has_weighted_loss: on the last stage, as soon as there was a loss: whether it is a pair (sum, count).
    """

    module: torch.nn.Module
    optimizer: MixedPrecisionOptimizer
    on_loss: Callable[[float], None]
    on_activity: Callable[[str], None]
    micro_losses: dict[int, torch.Tensor]
    has_weighted_loss: bool | None
    engine: Any

    def train_step(self, data: DataIterator, step: int, share: Share | None = None) -> StepResult: ...

    def evaluate_batch(self, data: DataIterator) -> float: ...

    def bubble(self) -> float | None: ...

    def busy(self) -> tuple[float, int]: ...


def nominal_weight(tokens_per_step: float) -> float:
    """Return the power of two nearest to the tokens of a step.

    Gradients are accumulated divided by it, which keeps fp16 in range and changes no other bit.
    """
    return 2.0 ** round(math.log2(max(tokens_per_step, 1)))


def token_weight(tokens_per_step: float, grid: Grid, *, is_mean: bool) -> float:
    """Return the number that the loss of one token is divided by in the backward, before loss scaling.

    Args:
        tokens_per_step: over all replicas.
        is_mean: the loss of a micro-batch is the mean over its tokens, not a pair (sum, count).
    """
    return tokens_per_step / grid.data_context.size if is_mean else nominal_weight(tokens_per_step)


def set_micro_batches(engine: Any, number: int) -> None:
    """Tell an engine of DeepSpeed's kind how many micro-batches its next step has."""
    now = engine.gradient_accumulation_steps()
    if number != now:
        engine.set_train_batch_size(engine.train_batch_size() // now * number)


class SingleStageEngine:
    """DeepSpeed's engine: forward and backward of each micro-batch in turn; reduction, norm and clipping are ours."""

    def __init__(
        self,
        engine: Any,
        forward_step: ForwardStep,
        *,
        grid: Grid,
        streams: DropoutStreams,
        share: Share,
        micro_batch_tokens: int,
        averages_micro_batches: bool = False,
        routers: Routers | None = None,
    ) -> None:
        """Take over ``engine``.

        Args:
            share: this replica's of a step for which nothing else is said, and of an evaluation.
            micro_batch_tokens: that a loss may be a sum over, of a micro-batch on all replicas together. The nominal
                weight of a step's tokens divides the sums of pairs in backward (a scalar: the micro-batches).
            averages_micro_batches: train on the mean of the micro-batches' means (``mean_of_micro_batch``).
            routers: of this rank's layers with experts; None: the model is dense.
        """
        self.engine = engine
        self.module: torch.nn.Module = engine.module
        self.optimizer: MixedPrecisionOptimizer = engine.optimizer
        self.forward_step = forward_step
        self.grid, self.streams = grid, streams
        self.share, self.micro_batch_tokens = share, micro_batch_tokens
        self.averages_micro_batches = averages_micro_batches
        self.routers = routers
        self.device = torch.device(engine.device)
        self.on_loss: Callable[[float], None] = FiniteLossCheck(self.optimizer).take_loss
        self.on_activity: Callable[[str], None] = lambda text: None
        self.micro_losses: dict[int, torch.Tensor] = {}
        self.has_weighted_loss: bool | None = None
        self._clock = clock_for(self.device)
        self._busy = BubbleTimer(self._clock)
        engine.enable_backward_allreduce = False

    def train_step(self, data: DataIterator, step: int, share: Share | None = None) -> StepResult:
        """Run this replica's micro-batches of step number ``step`` and update the weights. Collective."""
        first, number, mean = share or self.share
        set_micro_batches(self.engine, number)
        self.engine.train()
        reported: dict[str, torch.Tensor] = {}
        meter = LossMeter(number, nominal_weight(self.micro_batch_tokens * mean), self.device, lambda: reported, mean)
        self.engine.set_gradient_accumulation_boundary(False)
        self.micro_losses.clear()
        sums_gradients = self.optimizer.sums_gradients
        works_in_backward = sums_gradients or self.optimizer.gathers_weights
        began = self._clock.mark()
        for micro_batch in range(number):
            self.streams.position = DropoutKey(step, micro_batch, first)
            self.on_activity(f"step {step + 1}, forward of micro-batch {micro_batch}")
            loss, report = self.forward_step(data, self.engine)
            reported = scalars(report, loss)
            loss = as_weighted(loss)
            loss = mean_of_micro_batch(loss) if self.averages_micro_batches else loss
            trained = meter.add(loss, micro_batch)
            self.has_weighted_loss = next(iter(meter.sums.values())).is_weighted
            self.micro_losses[micro_batch] = trained.detach()
            if self.routers is not None:
                self._scale_routers(self.routers, mean)
            self.on_activity(f"step {step + 1}, backward of micro-batch {micro_batch}")
            if works_in_backward and micro_batch == number - 1:
                self.optimizer.begin_last_backward()
            self.engine.backward(trained * self.optimizer.loss_scale, scale_wrt_gas=False)
            if works_in_backward:
                self.optimizer.end_micro_batch()
        self._busy.note(began, self._clock.mark(), [])
        self.on_activity(f"step {step + 1}, reduction and update")
        agreement = self._agree(meter)
        if sums_gradients:
            self.optimizer.scale_gradients(1.0)
        elif self.grid.data_context.size > 1:  # what sums are multiplied by is left to the optimizer
            gradients = [gradient for p, gradient in self.optimizer.gradients() if not is_reduced_apart(p)]
            reduce_gradients(gradients, self.grid.data_context.handle)
        read_ahead(data)
        read_with_norm(self.optimizer, agreement)
        return self._update(*_loss_values(agreement.means()))

    @torch.no_grad()
    def evaluate_batch(self, data: DataIterator) -> float:
        """Return the mean loss of one global batch, without dropout and without touching training. Collective."""
        self.engine.eval()
        nominal = nominal_weight(self.micro_batch_tokens * self.share.mean)
        meter = LossMeter(self.share.number, nominal, self.device, mean_micro_batches=self.share.mean)
        with random_numbers_kept(self.device):  # a user's layers and samples may draw some
            for micro_batch in range(self.share.number):
                loss, _ = self.forward_step(data, self.engine)
                meter.add(as_weighted(loss), micro_batch)
        self.engine.train()
        return _loss_values(self._agree(meter).means())[0]

    def bubble(self) -> None:
        """Return None: a single stage waits for no other."""

    def busy(self) -> tuple[float, int]:
        """Return the seconds of own work since the last call, waits for the tensor group included, and the steps."""
        return _own_work(self._busy.drain())

    def _scale_routers(self, routers: Routers, mean_micro_batches: float) -> None:
        """Scale the router losses of a token by the weight that its cross entropy has in the backward.

        Args:
            mean_micro_batches: of a step, averaged over the replicas.
        """
        weight = token_weight(
            self.micro_batch_tokens * mean_micro_batches, self.grid, is_mean=not self.has_weighted_loss
        )
        routers.set_scale(self.optimizer.loss_scale / weight)

    def _agree(self, meter: LossMeter) -> LossReduction:
        """Return what the losses of all replicas, and of their pieces of sequences, came to. Collective."""
        data = self.grid.data_context
        return all_reduce_loss(meter, self.device, data_group=data.handle, data_size=data.size)

    def _update(self, loss: float, losses: dict[str, float]) -> StepResult:
        scale = self.optimizer.loss_scale
        self.on_loss(loss)
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        result = result_of(loss, losses, scale, self.optimizer)
        return result if self.routers is None else with_router_losses(result, self.routers, self.optimizer, self.device)


class PipelineStepEngine:
    """``tds``: the same step with the model's layers on several stages."""

    def __init__(
        self, engine: Any, *, grid: Grid, streams: DropoutStreams, share: Share, micro_batch_tokens: int,
        averages_micro_batches: bool = False, routers: Routers | None = None,
    ) -> None:  # fmt: skip
        """As ``SingleStageEngine``."""
        self.engine = engine
        self.module: torch.nn.Module = engine.module
        self.optimizer: MixedPrecisionOptimizer = engine.optimizer
        self.grid, self.streams = grid, streams
        self.share, self.micro_batch_tokens = share, micro_batch_tokens
        self.averages_micro_batches = averages_micro_batches
        self.routers, self.device = routers, torch.device(engine.device)
        self._step, self._first, self._micro_batch = 0, share.first, 0
        self.micro_losses: dict[int, torch.Tensor] = {}
        self.has_weighted_loss: bool | None = None
        self.on_loss: Callable[[float], None] = FiniteLossCheck(self.optimizer).take_loss
        self.on_activity: Callable[[str], None] = lambda text: None
        engine.agrees_on_data = False  # DataLoader never end
        engine.nominal_weight = nominal_weight(micro_batch_tokens * share.mean)
        engine.mean_micro_batches = share.mean
        engine.module.loss_fn = self._recording_losses(reading_pairs(engine.module.loss_fn))
        engine.on_micro_batch = self._start_micro_batch
        engine.on_action = lambda action: self.on_activity(f"step {self._step + 1}, {action}")
        engine.on_loss = lambda _: self.on_loss(_loss_values(engine.means)[0])

    def train_step(self, data: DataIterator, step: int, share: Share | None = None) -> StepResult:
        """Run this replica's micro-batches of step ``step`` through the stages and update the weights. Collective."""
        self._step, (self._first, number, mean) = step, share or self.share
        set_micro_batches(self.engine, number)
        self.engine.nominal_weight = nominal_weight(self.micro_batch_tokens * mean)
        self.engine.mean_micro_batches = mean
        self.micro_losses.clear()
        scale = self.optimizer.loss_scale
        if self.routers is not None:
            tokens = self.micro_batch_tokens * mean
            self.routers.set_scale(scale / token_weight(tokens, self.grid, is_mean=self._trains_on_means))
        with _raising_data_error():
            self.engine.train_batch(data)
        result = result_of(*_loss_values(self.engine.means), scale, self.optimizer)
        return result if self.routers is None else with_router_losses(result, self.routers, self.optimizer, self.device)

    @torch.no_grad()
    def evaluate_batch(self, data: DataIterator) -> float:
        """Return the mean loss of one global batch, without dropout and without touching training. Collective."""
        with _raising_data_error():
            self.engine.eval_batch(data, num_micro_batches=self.share.number)
        return _loss_values(self.engine.means)[0]  # which the host has read; what eval_batch returns it has not

    def bubble(self) -> float | None:
        """Return the share of time that stages idled in the training steps since the last call. Collective.

        None if there was no step.
        """
        share: float | None = self.engine.bubble()
        return share

    def busy(self) -> tuple[float, int]:
        """Return the seconds of own work since the last call, waits for other stages left out, and the steps."""
        return _own_work(self.engine.rows_of_steps("busy"))

    def _start_micro_batch(self, micro_batch: int) -> None:
        self._micro_batch = micro_batch
        self.streams.position = DropoutKey(self._step, micro_batch, self._first)

    def _recording_losses(self, loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return ``loss_fn`` that also keeps what each micro-batch of a step gave."""

        def noted(output: Any, labels: Any) -> Any:
            loss = loss_fn(output, labels)
            if torch.is_grad_enabled():
                loss = mean_of_micro_batch(loss) if self.averages_micro_batches else loss
                trained = next(iter(named_losses(loss, self._micro_batch).values()))
                self.has_weighted_loss = is_weighted(trained)
                if self.routers is not None and self.has_weighted_loss == self._trains_on_means:
                    raise ValueError(self._other_loss_text())
                self.micro_losses[self._micro_batch] = torch.as_tensor(getattr(trained, "total", trained)).detach()
            return loss

        noted.is_identity = not has_loss_function(loss_fn)  # type: ignore[attr-defined]
        return noted

    @property
    def _trains_on_means(self) -> bool:
        """True if each micro-batch is trained on its mean: by --loss-average, or as the model declares.

        Stages without the loss rely on it.
        """
        return self.averages_micro_batches or getattr(self.module, "loss_weighting", None) == "micro-batches"

    def _other_loss_text(self) -> str:
        actual = "a pair (sum, count)" if self.has_weighted_loss else "one number per micro-batch"
        return (
            f"the loss function of {type(self.module).__name__} returns {actual}, but its attribute loss_weighting is "
            f"{getattr(self.module, 'loss_weighting', None)!r}. Every stage of a pipeline with experts weights the "
            "losses of its routers by this attribute. Set loss_weighting = "
            f'"{"tokens" if self.has_weighted_loss else "micro-batches"}" on the model.'
        )


def with_router_losses(
    result: StepResult, routers: Routers, optimizer: MixedPrecisionOptimizer, device: torch.device
) -> StepResult:
    """Let the routers take what a step has counted; return ``result`` with their losses and choices. Collective."""
    losses, result.expert_load = routers.end_step(optimizer.last_factor, device, is_taken=not result.is_skipped)
    result.losses |= losses
    return result


@contextmanager
def _raising_data_error() -> Iterator[None]:
    """Turn what ``--check-data-agreement`` finds, the same on all ranks, into the error of data that cannot be used."""
    try:
        yield
    except DataDisagreement as error:
        raise DataError(str(error)) from error


def _loss_values(means: MeanLosses) -> tuple[float, dict[str, float]]:
    """Return the mean loss and the others by name, as numbers of the host."""
    (_, loss), *others = means.numbers.items()
    return loss, dict(others)


def _own_work(rows: list[Row]) -> tuple[float, int]:
    return 1e-9 * sum(ended - began - waited for began, ended, waited in rows), len(rows)


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step over all replicas: ``count`` from ``first`` on, in contiguous parts by replica.

    Args:
        step: its number, counted from 1 as progress lines do.
        micro_batch_size: samples of a micro-batch on one replica.
        replicas: data-parallel replicas.
    """

    step: int
    first: int
    count: int
    micro_batch_size: int
    replicas: int

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches on a replica, the most of all."""
        return self.share(0).number

    def share(self, replica: int) -> Share:
        """Return the micro-batches of a replica."""
        return share_of(self.count // self.micro_batch_size, self.replicas, replica)

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def text(self) -> str:
        """Say which samples these are."""
        return range_text(self.first, self.last)

    def of_micro_batch(self, replica: int, micro_batch: int) -> str:
        """Say which samples micro-batch ``micro_batch`` of a replica holds."""
        first = self.first + (self.share(replica).first + micro_batch) * self.micro_batch_size
        return range_text(first, first + self.micro_batch_size - 1)


def range_text(first: int, last: int) -> str:
    """Return "sample 5" or "samples 5-8"."""
    return f"sample {first}" if first == last else f"samples {first}-{last}"
