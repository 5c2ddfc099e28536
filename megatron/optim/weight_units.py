"""ZeRO 3: each replica keeps its parts of the weights; whole ones are gathered for a layer's passes and freed again.

A unit is what is gathered together: the weights of a layer (``megatron.optim.weight_layers``), or all that are in no
layer or in several (tables, final norms, heads, what layers share): the rest. A whole weight is always the same tensor,
and autograd's graph keeps it: only its memory comes and goes. Replicas gather the same units in the same order, or the
step ends in an error (``megatron.optim.call_order``).

| when | a layer | the rest |
|---|---|---|
| a module that has weights of it is called | gathered | gathered |
| that call returns, outside backward | freed | freed, but for a pass that backward will follow |
| backward asks for a weight that forward has saved | gathered | gathered |
| backward has left the gradient of each weight that it reaches | freed | freed |
| the micro-batch ends, or the weights change | freed | freed |

So a layer is gathered twice for each micro-batch, also where it is recomputed, which happens within backward. No output
of a module is looked at and no module is replaced: the weights that backward needs tell of themselves when autograd
unpacks them (``torch.autograd.graph.saved_tensors_hooks``), whatever a layer returns or leaves in attributes. DeepSpeed
and FSDP hang on the outputs of modules instead, which sees fewer of them.

Between its passes a weight has its shape and one number for all its elements, NaN: what reads one outside of any call
gets NaN rather than old values; layers that the first pass has not called are named in a warning. Frozen weights and
single numbers stay whole on every replica.

Source: Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023, "PyTorch FSDP", section 4.3, for keeping the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megatron import log
from megatron.mpu.groups import Group
from megatron.optim import backward
from megatron.optim.call_order import CallOrder
from megatron.optim.gather import Piece, buckets, gather
from megatron.optim.weight_layers import layers_of

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

    @torch.no_grad()
    def gather(self) -> None:
        """Have the whole weights here. Collective over the replicas."""
        if self.is_here:
            return
        self.is_here = True
        for whole in self._whole.values():
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        for bucket in buckets(self._pieces):
            gather(bucket, self._group)
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
            self._due = sum(map(backward.will_reach, self._whole))
        self._come += 1
        if self._come >= self._due and not self.calls:
            self.free()

    def num_bytes(self) -> int:
        """Return the bytes of the whole weights."""
        return sum(whole.nbytes for whole in self._whole.values())

    def storages(self) -> Iterator[int]:
        """Yield where the whole weights lie in memory."""
        return (whole.untyped_storage().data_ptr() for whole in self._whole.values())


class WeightUnits:
    """The units of a model, with the hooks that gather and free them.

    Args:
        module: its outermost forward is where autograd's graph is watched.
        pieces: of the weights that replicas share; others stay as they are.
    """

    def __init__(self, module: nn.Module, pieces: Mapping[nn.Parameter, Piece], group: Group) -> None:
        cut = {parameter: pieces[parameter] for parameter in module.parameters() if parameter in pieces}
        self.units: list[Unit] = []
        self._units_of: dict[nn.Module, list[Unit]] = {}
        self._at: dict[int, Unit] = {}
        self._depth = 0
        self._watch: saved_tensors_hooks | None = None
        self._module = module
        self._names = {inner: name for name, inner in module.named_modules()}
        self._has_told = False
        layers = layers_of(module, cut)
        for inner, weights in layers.items():
            self._add(inner, {p: cut[p] for p in weights}, group, stays=False)
        taken = {p for weights in layers.values() for p in weights}
        self._add(module, {p: piece for p, piece in cut.items() if p not in taken}, group, stays=True)
        self._order = CallOrder(group, [unit.name for unit in self.units], place_of(cut))
        self._hook(module)
        self._tell_largest()

    def free(self) -> None:
        """Free all that is gathered."""
        for unit in self.units:
            self._free(unit)

    def end_micro_batch(self) -> None:
        """Free all that is gathered, and take note that no more is called. Collective over the replicas."""
        self.free()
        self._order.end()

    def check(self) -> None:
        """Check that what replicas have gathered up to now is the same; they must not use it before.

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
        for unit in units:
            unit.calls += 1
            unit.was_called = True
            self._gather(unit)
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled() and not backward.is_running():
            self._watch = saved_tensors_hooks(self._pack, self._unpack)
            self._watch.__enter__()

    def _leave(self, units: list[Unit], module: nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._watch is not None:
            self._watch.__exit__()
            self._watch = None
            if module is self._module:
                self._tell_uncalled(output)
        for unit in units:
            unit.calls -= 1
            if not (unit.calls or backward.is_running() or (unit.stays and torch.is_grad_enabled())):
                self._free(unit)

    def _tell_largest(self) -> None:
        sizes = [unit.num_bytes() for unit in self.units]
        if not sizes:
            return
        largest, total = self.units[sizes.index(max(sizes))].name, sum(sizes)
        told = f"ZeRO 3 gathers {len(sizes)} units, the largest with {max(sizes) / total:.0%} of the weights: {largest}"
        if max(sizes) > MUCH * total:
            log.warn_once(
                f"{told}. So much is held at once: put layers in a ModuleList, whose elements come one by one"
            )
        else:
            log.info(told)

    def _tell_uncalled(self, output: Any) -> None:
        """After the first pass of all that backward may follow, name the layers that it has not called."""
        names = [unit.name for unit in self.units if not unit.was_called]
        if names and not self._has_told and output is not None:  # None: the pass has failed
            log.warning(
                f"--zero-stage 3 gathers weights when a module that has them is called, and {', '.join(names)} was not "
                "called in the first pass. If its weights were read there, they were NaN: call the module, or use "
                "--zero-stage 2"
            )
        self._has_told = self._has_told or output is not None

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
            self._order.gathers(self.units.index(unit))
            unit.gather()
            self._at.update(dict.fromkeys(unit.storages(), unit))

    def _free(self, unit: Unit) -> None:
        self._forget(unit)
        unit.free()

    def _forget(self, unit: Unit) -> None:
        self._at = {place: other for place, other in self._at.items() if other is not unit}


def place_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return where the first of ``tensors`` lies."""
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
