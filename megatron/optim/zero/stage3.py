"""Weights gathered per layer, one layer ahead, and freed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megatron import log
from megatron.mpu.groups import Group
from megatron.optim.zero.gather import Gather, Piece, buckets_of_pieces
from megatron.optim.zero.gather_order import TRAINING, GatherOrder
from megatron.optim.zero.layers import layers_of
from tds import backward_state

# ZeRO 3: each replica keeps its parts of the weights; whole ones are gathered for a layer's passes and freed again.
#
# A unit is what is gathered together: the weights of a layer (above), or all that are in no
# layer or in several (tables, final norms, heads, what layers share): the rest. A whole weight is always the same
# tensor, and autograd's graph keeps it: only its memory comes and goes. Replicas gather the same units in the same
# order, or the step ends in an error; the next unit of that order is on its way while one is used (``GatherOrder``).
#
# | when | a layer | the rest |
# |---|---|---|
# | a module that has weights of it is called | gathered | gathered |
# | that call returns, outside backward | freed | freed, but for a pass that backward will follow |
# | backward asks for a weight that forward has saved | gathered | gathered |
# | backward has left the gradient of each weight that it reaches | freed | freed |
# | the micro-batch ends, or the weights change | freed | freed |
#
# So a layer is gathered twice for each micro-batch, also where it is recomputed, which happens within backward. Beyond
# what is in use one unit is held, as the message of its gather: its own memory comes when it is called. No
# output of a module is looked at and no module is replaced: the weights that backward needs tell of themselves when
# autograd unpacks them (``torch.autograd.graph.saved_tensors_hooks``), whatever a layer returns or leaves in
# attributes. DeepSpeed and FSDP hang on the outputs of modules instead, which sees fewer of them.
#
# Between its passes a weight has its shape and one number for all its elements, NaN: what reads one outside of any call
# gets NaN rather than old values; layers that the first pass has not called are named in a warning. Frozen weights and
# single numbers stay whole on every replica.
#
# Source: Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023, "PyTorch FSDP", section 4.3, for keeping the tensor.

REST = "what is in no layer"
MUCH = 0.5
"""Of all weights: a larger unit is warned of, for ZeRO 3 saves little then."""


class Unit:
    """Weights that are gathered and freed together.

    Args:
        name: of the module, for messages.
        pieces: the whole weights, whose memory is this unit's from now on, and what this replica keeps of each.
    """

    def __init__(self, name: str, pieces: dict[nn.Parameter, Piece], group: Group, *, stays: bool) -> None:
        self.name = name
        self.stays = stays  # from a forward to its backward
        self.was_called = False
        self.calls = 0
        self.is_here = False
        self._group = group
        self._whole = {p: torch.empty_like(p, memory_format=torch.contiguous_format).detach() for p in pieces}
        self._pieces = [Piece(whole, pieces[p].master, pieces[p].cut) for p, whole in self._whole.items()]
        self._come = self._due = 0
        self.is_here = True
        self.free()

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        return self._whole

    def gather(self) -> None:
        """Have the whole weights here. Collective over the replicas."""
        if not self.is_here:
            self.take(self.start())

    def start(self, note: Sequence[int] = ()) -> Iterator[Gather]:
        """Yield the gathers of the whole weights, each started when it is asked for. Collective over the replicas.

        Args:
            note: what goes with the first one.
        """
        for number, bucket in enumerate(buckets_of_pieces(self._pieces)):
            yield Gather.start(bucket, self._group, () if number else note)

    @torch.no_grad()
    def take(self, gathers: Iterable[Gather]) -> None:
        """Have the whole weights here, from what ``start`` yields."""
        self.is_here = True
        for whole in self._whole.values():
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        for gather in gathers:
            gather.finish()
            del gather  # its memory is given back before the next one takes some
        for parameter, whole in self._whole.items():
            parameter.data = whole

    def free(self) -> None:
        """Give the memory of the whole weights back."""
        self._come = 0
        if not self.is_here:
            return
        self.is_here = False
        for parameter, whole in self._whole.items():
            parameter.data = whole.new_full((), torch.nan).expand(whole.shape)
            whole.untyped_storage().resize_(0)

    def note_gradient(self) -> None:
        """Take note that backward has left the gradient of one of the weights: it needs none of them after the last."""
        if not self._come:
            self._due = sum(map(backward_state.will_reach, self._whole))
        self._come += 1
        if self._come >= self._due and not self.calls:
            self.free()

    def num_bytes(self) -> int:
        """Return the bytes of the whole weights."""
        return sum(whole.nbytes for whole in self._whole.values())

    def storages(self) -> Iterator[int]:
        """Yield where the whole weights lie in memory."""
        return (whole.untyped_storage().data_ptr() for whole in self._whole.values())


class ParamUnits:
    """The units of a model, with the hooks that gather and free them.

    Args:
        module: its outermost forward is where autograd's graph is watched.
        pieces: of the weights that replicas share; others stay as they are.
        prefetches: gather a unit ahead where the order is known, and there are several replicas.
    """

    def __init__(
        self, module: nn.Module, pieces: Mapping[nn.Parameter, Piece], group: Group, *, prefetches: bool = True
    ) -> None:
        cut = {parameter: pieces[parameter] for parameter in module.parameters() if parameter in pieces}
        self.units: list[Unit] = []
        self._units_of: dict[nn.Module, list[Unit]] = {}
        self._at: dict[int, Unit] = {}
        self._depth = 0
        self._watch: saved_tensors_hooks | None = None
        self._module = module
        self._names = {inner: name for name, inner in module.named_modules()}
        self._has_warned = False
        layers = layers_of(module, cut)
        for inner, weights in layers.items():
            self._add(inner, {p: cut[p] for p in weights}, group, stays=False)
        taken = {p for weights in layers.values() for p in weights}
        self._add(module, {p: piece for p, piece in cut.items() if p not in taken}, group, stays=True)
        self._numbers = {unit: number for number, unit in enumerate(self.units)}
        self._kinds = {inner: TRAINING + 1 + number for number, inner in enumerate(module.modules())}
        self._is_all_here = False
        self._order = GatherOrder(group, self.units, place_of(cut), prefetches=prefetches and group.size > 1)
        self._hook(module)
        self._log_largest()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have all weights of the model here, for who calls its layers by another way. Collective over the replicas."""
        self._order.drop()
        self._is_all_here = True
        for unit in self.units:
            unit.calls += 1  # so that no call within frees it
            unit.gather()
        try:
            yield
        finally:
            self._is_all_here = False
            for unit in self.units:
                unit.calls -= 1
            self.free()

    def free(self) -> None:
        """Free all that is gathered, ahead of its use too. On all replicas."""
        self._order.drop()
        for unit in self.units:
            self._free(unit)

    def end_micro_batch(self) -> None:
        """Free all that is gathered, and take note that no more is called. Collective over the replicas."""
        self._order.end()
        self.free()

    def check(self) -> None:
        """Check that what replicas have gathered up to now is the same; they must not use it before. Collective.

        Raises:
            ConfigError: it is not; the same on every replica.
        """
        self._order.check()

    def _add(self, module: nn.Module, pieces: dict[nn.Parameter, Piece], group: Group, *, stays: bool) -> None:
        if not pieces:
            return
        unit = Unit(self._names[module] if not stays else REST, pieces, group, stays=stays)
        self.units.append(unit)
        self._units_of.setdefault(module, []).append(unit)
        for parameter in unit.parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: self._note_gradient(unit))

    def _hook(self, module: nn.Module) -> None:
        """Watch the calls of every module that has a weight of a unit by itself, and of those that units are of."""
        unit_of = {parameter: unit for unit in self.units for parameter in unit.parameters}
        for inner in module.modules():
            own = [unit_of[p] for p in inner.parameters(recurse=False) if p in unit_of]
            units = list(dict.fromkeys([*self._units_of.get(inner, []), *own]))
            if units or inner is module:
                inner.register_forward_pre_hook(partial(self._enter, units), prepend=True)  # others read weights
                inner.register_forward_hook(partial(self._leave, units), always_call=True)

    def _enter(self, units: list[Unit], module: nn.Module, inputs: Any) -> None:
        if self._depth == 0 and not backward_state.is_running() and not self._is_all_here:
            self._order.begin(TRAINING if torch.is_grad_enabled() else self._kinds[module])
        for unit in units:
            unit.calls += 1
            unit.was_called = True
            self._gather(unit)
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled() and not backward_state.is_running():
            self._watch = saved_tensors_hooks(self._pack, self._unpack)
            self._watch.__enter__()

    def _leave(self, units: list[Unit], module: nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._watch is not None:
            self._watch.__exit__()
            self._watch = None
            if module is self._module:
                self._warn_uncalled(output)
        for unit in units:
            unit.calls -= 1
            if not (unit.calls or backward_state.is_running() or (unit.stays and torch.is_grad_enabled())):
                self._free(unit)
        if self._depth == 0 and self._order.kind == self._kinds[module] and output is not None:  # None: it has failed
            self._order.end()

    def _log_largest(self) -> None:
        sizes = [unit.num_bytes() for unit in self.units]
        if not sizes:
            return
        largest, total = self.units[sizes.index(max(sizes))].name, sum(sizes)
        message = (
            f"ZeRO 3 gathers {len(sizes)} units, the largest with {max(sizes) / total:.0%} of the weights: {largest}"
        )
        if max(sizes) > MUCH * total:
            log.warn_once(
                f"{message}. So much is held at once: put layers in a ModuleList, whose elements come one by one"
            )
        else:
            log.info(message)

    def _warn_uncalled(self, output: Any) -> None:
        """After the first pass of all that backward may follow, name the layers that it has not called."""
        names = [unit.name for unit in self.units if not unit.was_called]
        if names and not self._has_warned and output is not None:  # None: the pass has failed
            log.warning(
                f"--zero-stage 3 gathers weights when a module that has them is called, and {', '.join(names)} was not "
                "called in the first pass. If its weights were read there, they were NaN: call the module, or use "
                "--zero-stage 2"
            )
        self._has_warned = self._has_warned or output is not None

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Return what the graph keeps of ``tensor``: beside a weight its unit, which may be away when it is needed."""
        if tensor.layout is not torch.strided:  # it has no such storage, and is no weight
            return tensor.detach()
        unit = self._at.get(tensor.untyped_storage().data_ptr())
        return tensor.detach() if unit is None else (unit, tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        unit, tensor = packed
        self._gather(unit)
        return tensor

    def _note_gradient(self, unit: Unit) -> None:
        unit.note_gradient()
        if not unit.is_here:
            self._forget(unit)

    def _gather(self, unit: Unit) -> None:
        if not unit.is_here:
            self._order.gather(self._numbers[unit])
            self._at.update(dict.fromkeys(unit.storages(), unit))

    def _free(self, unit: Unit) -> None:
        self._forget(unit)
        unit.free()

    def _forget(self, unit: Unit) -> None:
        self._at = {place: other for place, other in self._at.items() if other is not unit}


def place_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return where the first of ``tensors`` lies."""
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
