"""MainParams (fp32, whole or partitioned) and MainGradients (whole, overlapped with backward, sums over the
sequence-parallel group).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.mappings import all_reduce
from megatron.mpu.shard import Shard, is_partial, set_shard, shard_of
from megatron.optim.grad_buffer import GradBuffer, scatters
from megatron.optim.zero.param_gather import ParamGather, gathers_later
from megatron.optim.zero.partition import (
    NOTHING,
    OffloadConfig,
    ParamInit,
    ParamPartition,
    Piece,
    gather_all,
    partition_of,
)
from tds.grad_norm import accurate_dtype
from tds.gradient_reducer import AgreedOrder, Bucket, BucketSchedule, GradientReducer
from tds.gradients import WIDE, bucket_numbers, is_reduced_apart, multiply, reduce_gradients
from tds.linear import add_product

# The tensors that the inner optimizer updates: the parameters themselves, wider copies of them, or parts of either. A
# parameter of 32 or 64 bits (``WIDE``) is its own master.


class MainParams:
    """The masters of this replica's parameters.

    | precision | ZeRO 0 | ZeRO 1, 2 | ZeRO 3 |
    |---|---|---|---|
    | fp32, fp64 | the parameter | a view of the replica's part of it | the part |
    | bf16, fp16 | a copy in fp32 | a copy in fp32 of the replica's part | a copy in fp32 of the part |

    With offload of the optimizer each is a copy on the CPU. ``homes`` are the parts of the weights that ZeRO 3 keeps.

    Args:
        data: the replicas.
        expert_data: those that have the same experts, where not all do.
        zero_stage: from 1 on each replica has parts; with one replica there is nothing to cut, unless weights are
            offloaded.
        param_init: with ZeRO 3, how weights come that are not where they are trained yet; None: all are there.
        reduce_bucket_size, allgather_bucket_size: numbers of a bucket of gradients that are summed, and of weights that
            are gathered after an update; 0: as ``tds.gradients.bucket_numbers`` has it.

    Attributes:
        are_apart: a parameter is not its own master: an update is to be brought into it.
    """

    def __init__(
        self,
        data: Group = SINGLE,
        expert_data: Group = SINGLE,
        *,
        zero_stage: int = 0,
        offload: OffloadConfig = NOTHING,
        param_init: ParamInit | None = None,
        reduce_bucket_size: int = 0,
        allgather_bucket_size: int = 0,
    ) -> None:
        self.data_group, self._expert_group = data, expert_data
        self._asked = {"reduce": reduce_bucket_size, "allgather": allgather_bucket_size}
        self.offload = offload
        self.of: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self.homes: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.are_apart = False
        self._zero_stage = zero_stage
        self._is_cut = zero_stage > 0 and (data.size > 1 or offload.parameters)
        self._has_homes = zero_stage == 3 and self._is_cut
        self._cuts: dict[torch.nn.Parameter, ParamPartition] = {}
        self._param_init = param_init if self._has_homes else None
        self._are_away = self._param_init is not None

    def register(self, parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
        """Let ``parameter`` have ``dtype`` from now on and return its master."""
        is_wide = dtype in WIDE
        replicas = self.group_of(parameter).size
        is_apart = is_reduced_apart(parameter) and replicas == 1  # an expert that no other rank has is its own master
        cut = partition_of(parameter, replicas) if self._is_cut and not is_apart else None
        if self._param_init is not None:
            self._param_init.come(parameter, is_cut=cut is not None)
        if is_wide:
            parameter.data = parameter.data.to(dtype)
        self.of[parameter] = parameter
        if cut is not None or not is_wide or self.offload.optimizer:
            self.of[parameter], self.are_apart = self._make(parameter, cut, is_wide), True
        parameter.data = parameter.data.to(dtype)
        if cut is not None and self._has_homes:
            self.homes[parameter] = self._home(parameter, cut, is_wide)
            if self._param_init is not None:
                self._param_init.leave(parameter)
        return self.of[parameter]

    def group_of(self, parameter: torch.Tensor) -> Group:
        """Return the replicas of ``parameter``."""
        return self._expert_group if is_reduced_apart(parameter) else self.data_group

    def bucket_numbers(self, place: torch.device, of: str = "reduce") -> int | None:
        """Return how many numbers travel together on ``place``; None: as many as ``BUCKET_BYTES`` allow.

        Sums of ZeRO 2 and 3 are made in copies of buckets, which grow if they are asked to alone.
        """
        asked = self._asked[of]
        if of == "reduce" and self._zero_stage > 1:
            return asked or None
        return bucket_numbers(place, self.data_group.size, asked)

    @property
    def are_shared_out(self) -> bool:
        """Whether replicas have parts of the masters, from ZeRO 1 on."""
        return self._is_cut and self.data_group.size > 1

    def is_cut(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether each replica has a part of ``parameter`` only."""
        return parameter in self._cuts

    def cut(self, parameter: torch.nn.Parameter) -> ParamPartition | None:
        """Return how ``parameter`` is cut over the replicas; None where all have the whole of it."""
        return self._cuts.get(parameter)

    def part(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """Return what lies in ``whole``, of the shape of ``parameter``, where its master lies in it; in one run."""
        cut = self._cuts.get(parameter)
        return whole if cut is None else cut.part(whole, self.group_of(parameter).rank).contiguous()

    def gather_later(self, module: torch.nn.Module) -> ParamGather | None:
        """Let ``module`` wait for updated weights where it needs them; None where they are here at once (gloo)."""
        if not self._cuts or self._has_homes or self.data_group.size == 1 or not gathers_later(self.data_group):
            return None
        weights = [parameter for parameter in module.parameters() if parameter in self._cuts]
        is_whole = len(weights) == len(self._cuts)
        weights = [parameter for parameter in weights if not is_reduced_apart(parameter)]
        return ParamGather(module, weights, self.data_group) if is_whole else None

    def send_away(self) -> dict[torch.nn.Parameter, Piece]:
        """Let the whole weights of which there are homes be somebody else's from now on; return how they are made."""
        self._are_away = True
        return {p: Piece(p.detach(), home, self._cuts[p]) for p, home in self.homes.items()}

    @torch.no_grad()
    def to_parameters(self, later: ParamGather | None = None) -> None:
        """Round the masters into the parameters. Collective over the replicas where masters are cut.

        Args:
            later: what lets the parts of the other replicas come where they are needed; None: they are here at once.
        """
        for parameter, home in self.homes.items():
            if home.data_ptr() != self.of[parameter].data_ptr():
                home.copy_(self.of[parameter])
        pairs = [(p, m) for p, m in self.of.items() if p is not m and p not in self._cuts]
        if pairs:
            # not blocking, a device rounds what it is sent; else the host would, to memory that is not pinned
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs], non_blocking=True)
        away = self.homes if self._are_away else {}
        cuts = {parameter: cut for parameter, cut in self._cuts.items() if parameter not in away}
        pieces = {p: Piece(p.detach(), self.of[p].detach(), cut) for p, cut in cuts.items()}
        if not pieces:
            return
        numbers = self.bucket_numbers(next(iter(pieces)).device, "allgather")
        apart = {p: pieces.pop(p) for p in list(pieces) if is_reduced_apart(p)}
        if apart:
            gather_all(apart.values(), self._expert_group, numbers)
        if later is None:
            gather_all(pieces.values(), self.data_group, numbers)
        else:
            later.start(pieces, numbers)

    @torch.no_grad()
    def from_parameters(self) -> None:
        """Let each master hold what its part of the parameter holds."""
        for parameter, master in self.of.items():
            if parameter is not master:
                home = self.homes.get(parameter)
                master.copy_(self.part(parameter, parameter) if home is None else home)

    @contextmanager
    def contiguous(self) -> Iterator[None]:
        """Let every master lie in one run of memory: fused optimizers take for granted that it does."""
        strided = [(m, m.data) for m in self.of.values() if not m.is_contiguous()] if self._is_cut else []
        for master, _ in strided:
            master.data = master.data.contiguous()
        try:
            yield
        finally:
            for master, view in strided:
                view.copy_(master.data)
                master.data = view

    def _make(self, parameter: torch.nn.Parameter, cut: ParamPartition | None, is_wide: bool) -> torch.nn.Parameter:
        shard, part = shard_of(parameter), parameter.detach()
        if cut is not None:
            self._cuts[parameter] = cut
            shard, part = cut.shard(shard, self.group_of(parameter).rank), self._own_part(parameter, cut)
        if self.offload.optimizer:
            part = self.offload.copy(part if is_wide else part.float())
        elif not is_wide:
            part = part.float().clone()
        elif self._has_homes:
            part = part.clone(memory_format=torch.contiguous_format)
        return set_shard(torch.nn.Parameter(part), shard)

    def _home(self, parameter: torch.nn.Parameter, cut: ParamPartition, is_wide: bool) -> torch.Tensor:
        """Return the part of the weight that this replica keeps: the master itself, where it may be that."""
        if is_wide and self.offload.parameters == self.offload.optimizer:
            return self.of[parameter].detach()
        part = self._own_part(parameter, cut)
        return self.offload.copy(part) if self.offload.parameters else part.clone(memory_format=torch.contiguous_format)

    def _own_part(self, parameter: torch.nn.Parameter, cut: ParamPartition) -> torch.Tensor:
        """Return this replica's part of ``parameter``, where that is trained."""
        part = cut.part(parameter.detach(), self.group_of(parameter).rank)
        return part if self._param_init is None else part.to(self._param_init.device)


# The gradients of a step, added up over its micro-batches.


class Gradients(Protocol):
    """What a step needs of the gradients that its micro-batches leave.

    Attributes:
        are_summed: over the replicas, by themselves: the engine must not do it again.
    """

    are_summed: bool

    @property
    def holders(self) -> Group:
        """The replicas over which a sum over all gradients is taken; one alone where each has the whole of them."""

    def register(self, parameter: torch.nn.Parameter) -> None:
        """Take what backward leaves in ``parameter``, which has its dtype, from now on."""

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the gradient that this rank holds, zeros if no micro-batch has reached ``parameter`` yet."""

    def shard(self, parameter: torch.nn.Parameter) -> Shard:
        """Return where that lies in the global tensor."""

    def part(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return what of it lies where the master does, in one run of memory."""

    def is_counted_in_norm(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether this replica counts it in sums over ``holders``."""

    def begin_last_backward(self) -> None:
        """Take note that the next backward is the last of the step."""

    def end_micro_batch(self) -> None:
        """Take note that backward is through. Collective where gradients are summed by themselves."""

    def finish(self, factor: float) -> None:
        """Have all gradients where they lie, times ``factor``."""

    def clear(self) -> None:
        """Forget all of them."""


class MainGradients:
    """Gradients of one replica, or those that each replica holds whole: ZeRO 0 and 1.

    Those of 16-bit parameters are added up in fp32 and freed at once, others are where autograd leaves them.
    """

    are_summed, holders = False, SINGLE

    def __init__(self, masters: MainParams) -> None:
        self._masters = masters
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}

    def register(self, parameter: torch.nn.Parameter) -> None:
        if parameter.dtype not in WIDE:
            parameter.register_post_accumulate_grad_hook(self._add_to_sum)

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter.dtype not in WIDE:
            if parameter not in self._sums:
                self._sums[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
            return self._sums[parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def add_product(self, parameter: torch.nn.Parameter, rows: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add ``rows^T inputs``, the gradient of ``parameter`` in a backward, by the product itself."""
        place = parameter.grad if parameter.dtype in WIDE else self._sums.get(parameter)
        is_first = place is None
        if place is None:
            place = torch.empty_like(parameter, dtype=accurate_dtype(parameter.dtype), requires_grad=False)
            if parameter.dtype in WIDE:
                parameter.grad = place
            else:
                self._sums[parameter] = place
        add_product(place, rows.t(), inputs, is_first=is_first)

    def shard(self, parameter: torch.nn.Parameter) -> Shard:
        return shard_of(parameter)

    def part(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self._masters.part(parameter, self.of(parameter))

    def is_counted_in_norm(self, parameter: torch.nn.Parameter) -> bool:
        return True

    def begin_last_backward(self) -> None:
        """Nothing is summed here."""

    def end_micro_batch(self) -> None:
        """Nothing is summed here."""

    def finish(self, factor: float) -> None:
        multiply([self.of(parameter) for parameter in self._masters.of], factor)

    def clear(self) -> None:
        self._sums.clear()

    def _add_to_sum(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        if parameter in self._sums:
            self._sums[parameter].add_(parameter.grad)  # type: ignore[index]
        else:
            self._sums[parameter] = parameter.grad.float()  # type: ignore[index]
        parameter.grad = None


class BufferedGradients(MainGradients):
    """Gradients of several replicas with ZeRO 0 or 1, in a ``GradBuffer``: their sums are made where they lie.

    The engine makes them, in its own buckets (``follow``). With ZeRO 1 on NCCL they leave each replica its parts.
    """

    def __init__(self, masters: MainParams) -> None:
        super().__init__(masters)
        self._order = AgreedOrder(masters.data_group.handle, masters.bucket_numbers)
        self.buffer = GradBuffer(self._order, masters.data_group)

    def follow(self, order: BucketSchedule) -> Callable[[Bucket], Any] | None:
        """Let gradients lie in the buckets of ``order`` from now on.

        Returns:
            what starts the sum of a bucket of which each replica gets its parts; None where each gets the whole.
        """
        group = self._masters.data_group
        is_scattered = self._masters.are_shared_out and scatters(group)
        self.buffer = GradBuffer(order, group, self._cut if is_scattered else None)
        return self.buffer.start_reduce_scatter if is_scattered else None

    def _cut(self, parameter: torch.nn.Parameter) -> ParamPartition | None:
        """Return how the sum of a gradient is cut; that of an expert, which is made elsewhere, is whole."""
        return None if is_reduced_apart(parameter) else self._masters.cut(parameter)

    @property
    def holders(self) -> Group:  # type: ignore[override]
        return self._masters.data_group if self.buffer.is_scattered else SINGLE

    def register(self, parameter: torch.nn.Parameter) -> None:
        if not is_reduced_apart(parameter):
            self._order.register(parameter)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self._add_to_sum)

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        self.buffer.add(parameter)  # of a parameter without a hook, such as one unfrozen since
        return self.buffer.main_grad(parameter)

    def add_product(self, parameter: torch.nn.Parameter, rows: torch.Tensor, inputs: torch.Tensor) -> None:
        self.buffer.add_product(parameter, rows, inputs)

    def shard(self, parameter: torch.nn.Parameter) -> Shard:
        is_part = self.buffer.is_scattered and not is_reduced_apart(parameter)
        return shard_of(self._masters.of[parameter] if is_part else parameter)

    def part(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        is_part = self.buffer.is_scattered and not is_reduced_apart(parameter)
        return self.of(parameter) if is_part else super().part(parameter)

    def is_counted_in_norm(self, parameter: torch.nn.Parameter) -> bool:
        return not self.buffer.is_scattered or self._masters.is_cut(parameter) or self.holders.rank == 0

    def clear(self) -> None:
        self.buffer.clear()

    def _add_to_sum(self, parameter: torch.Tensor) -> None:
        self.buffer.add(parameter)  # type: ignore[arg-type]


class EngineGradients:
    """What ``tds`` asks of an optimizer's gradients (``tds.gradients.GradientSource``).

    The engine adds up over micro-batches by autograd, over stages and replicas itself; the optimizer multiplies, takes
    the norm and clips in its own step, and forgets the gradients at its end.
    """

    come_in_hooks = takes_unfrozen = are_multiplied_in_step = clips_itself = True
    norm_is_scaled = False

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def follow(self, order: BucketSchedule) -> Callable[[Bucket], Any] | None:
        """Let gradients lie in the buckets of ``order``; return what starts sums that leave each replica its parts."""
        return self._optimizer.lay_gradients_out(order)

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the accumulated gradient, zeros if no micro-batch has reached ``parameter`` yet."""
        gradient = self._optimizer.gradient_of(parameter)
        if gradient is None:  # trained, and in no group of the optimizer
            gradient = parameter.grad = torch.zeros_like(parameter)
        return gradient

    def loss_scale(self) -> float:
        """Return what each loss is multiplied by ahead of its backward."""
        return float(self._optimizer.loss_scale)

    def before_backward(self) -> None:
        """Nothing is to be done: hooks take what autograd leaves."""

    def after_backward(self) -> None:
        """Nothing is to be done."""

    def before_step(self) -> None:
        """Nothing is to be done."""

    def after_step(self) -> None:
        """Forget all gradients."""
        self._optimizer.zero_grad()

    def forget(self) -> None:
        """Forget those of a batch on which no step is taken."""
        self._optimizer.zero_grad()


# ZeRO 0 and 1: whole gradients that are summed over the replicas while the last backward of a step runs.
#
# Up to the last micro-batch a gradient is added up where it lies, and nothing is sent. In the last backward each is
# final as soon as it comes. What the last micro-batch does not reach has the sum of the others, or zeros: its bucket
# goes last.


class OverlappedMainGradients(BufferedGradients):
    """``BufferedGradients`` that are summed over the replicas by themselves."""

    are_summed = True

    def __init__(self, masters: MainParams) -> None:
        super().__init__(masters)
        group = masters.data_group.handle
        scatter = self.follow(self._order)
        way_out = "Recompute with use_reentrant=False, or add --no-overlap-grad-reduce"
        self._reducer = GradientReducer(self._order, self.of, group, way_out=way_out, scatter=scatter)
        self._is_last = False

    def begin_last_backward(self) -> None:
        self._is_last = True
        self._reducer.begin_last_backward()  # its hooks come behind those that add up in fp32

    def end_micro_batch(self) -> None:
        """After the last one start the sums that have not started. Collective."""
        if self._is_last:
            self._is_last = False
            self._reducer.end_last_backward()
            self._reducer.finish_launch()

    def finish(self, factor: float) -> None:
        self._reducer.wait(factor)

    def clear(self) -> None:
        self._is_last = False
        self._reducer.reset()
        super().clear()


# Gradients of weights that each tensor rank has applied to its part of the sequence: the sum over the ranks.
#
# Norms, the biases behind row-parallel products and what else lies between the tensor-parallel regions is held whole by
# every tensor rank. With --sequence-parallel each sees a part of the positions there, and its gradient is a summand.
# They are added up once a step, behind the sums over micro-batches, replicas and tied copies, in the type of those, in
# one message: a copy of a few vectors for each layer, a table of positions [max_positions, h], BERT's transform [h, h].
# The copy is there when the activations are not, and ``megatron.costs.memory`` leaves it out.
#
# Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.2.


class SequenceParallelGradients:
    """The parameters of one rank whose gradients are summands.

    Args:
        group: the tensor ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._parameters: list[torch.nn.Parameter] = []

    def register(self, parameter: torch.nn.Parameter) -> None:
        """Sum the gradient of ``parameter`` from now on, if it is a summand."""
        if self._group.size > 1 and is_partial(parameter):
            self._parameters.append(parameter)

    @torch.no_grad()
    def sum(self, gradient_of: Callable[[torch.nn.Parameter], torch.Tensor]) -> None:
        """Replace the gradients by their sums. Collective over the tensor ranks."""
        gradients = [gradient_of(parameter) for parameter in self._parameters]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            same = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = all_reduce(torch.cat([gradient.reshape(-1) for gradient in same]), self._group)
            for gradient, summed in zip(same, flat.split([each.numel() for each in same]), strict=True):
                gradient.copy_(summed.view_as(gradient))


# Gradients of weights of experts, which ranks of the data group do not all have: the sum over those that do.


class ExpertGradients:
    """The parameters of this rank's experts, where ranks of the data group have others.

    Their gradients are summed once a step, behind the sums over micro-batches, where they lie.

    Args:
        group: the ranks that have the same experts.

    Attributes:
        are_there: whether there are any.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._parameters: list[torch.nn.Parameter] = []
        self.are_there = False

    def register(self, parameter: torch.nn.Parameter) -> None:
        """Sum the gradient of ``parameter`` from now on, if it is of an expert that not all replicas have."""
        if is_reduced_apart(parameter):
            self._parameters.append(parameter)
            self.are_there = True

    @torch.no_grad()
    def sum(self, gradient_of: Callable[[torch.nn.Parameter], torch.Tensor]) -> None:
        """Replace the gradients by their sums. Collective over those with the same experts."""
        if self.are_there:
            reduce_gradients([gradient_of(parameter) for parameter in self._parameters], self._group.handle)
