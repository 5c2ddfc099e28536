"""ParamUnits: gathers full weights under ZeRO 3 for a layer's forward and backward and frees them afterwards.

A unit consists of weights that are gathered together: the weights of a layer (``layers``), or all weights that belong
to no layer or to several layers (embeddings, final norms, heads, shared weights). The full weight is always the same
tensor object, to which autograd's graph refers; only its memory is allocated and freed. Replicas must gather the same
units in the same order; otherwise the step raises an error. The next unit is gathered while the current unit is used
(``GatherOrder``).

| event | unit of a layer | unit of all other weights |
|---|---|---|
| forward of a module with its weights starts | gathered | gathered |
| that forward returns, outside backward | freed | freed, unless backward follows |
| backward needs a weight that forward has saved | gathered | gathered |
| backward has computed the gradients of all weights that it reaches | freed | freed |
| the micro-batch ends, or the weights are updated | freed | freed |

On a pipeline stage, micro-batches alternate, so no weight is kept from a forward to its backward. Its units are

* the weights of each layer that the stage calls. They are gathered for its forward. Those of a chunk's last layer are
  freed when the action of the schedule ends, because the loss function may read them;
* weights that functions or several layers read, such as tied weights: one unit for each set of chunks that read them.
  They are gathered when a forward of such a chunk starts, and freed when the action ends. With recompute, whose
  forwards may read them again, a backward also gathers them when it starts.

Backward gathers and frees units as in the table, and the end of the action frees the remaining ones. Each action begins
with ``begin_action`` and ends with ``end_action``. The loss function runs in ``forward_scope``.

A layer is gathered twice per micro-batch, also with recompute, which runs within backward. In addition to the units in
use, one prefetched unit is held as the output of its all-gather. Outputs of modules are not inspected and no module is
replaced: ``torch.autograd.graph.saved_tensors_hooks`` reports the weights that backward needs, whatever a layer returns
or stores in attributes. DeepSpeed and FSDP hook the outputs of modules, which misses some cases.

A weight that is not gathered keeps its shape and consists of a single expanded NaN, so that reading it outside a
forward yields NaN rather than an outdated value. A warning names the layers that the first forward has not called.
Every replica holds frozen weights and scalars in full.

Source: Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023, "PyTorch FSDP", section 4.3, for freeing only the memory
of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megatron import log
from megatron.mpu.groups import Group
from megatron.optim.zero.gather import Gather, ShardedWeight, buckets_of_weights
from megatron.optim.zero.gather_order import TRAINING, GatherOrder
from megatron.optim.zero.layers import called_layers, is_stage, kept_weights, weight_reader
from megatron.optim.zero.unit_memory import allocate_weights
from tds import backward_state
from tds.gradients import is_reduced_by_optimizer

OTHER_WEIGHTS = "weights outside of layers"
FORWARD, DEFERRED = "Forward", "BackwardWeight"
"""Types of the actions of a pipeline that do not start by recomputing layers."""
LARGE_UNIT_FRACTION = 0.5
"""Units with more than this fraction of all weights cause a warning, because ZeRO 3 then saves little memory."""


class Unit:
    """Weights that are gathered and freed together.

    Args:
        name: name of the module, for messages.
        weights: weights with this replica's shards. From now on the unit allocates and frees their memory.
        group_of: returns the group over which a weight is sharded: the replicas, or the ranks with the same experts.
        is_kept_for_backward: keep the weights from a forward to its backward.
    """

    def __init__(
        self,
        name: str,
        weights: dict[nn.Parameter, ShardedWeight],
        group_of: Callable[[torch.Tensor], Group],
        *,
        is_kept_for_backward: bool,
    ) -> None:
        self.name = name
        self.is_kept_for_backward = is_kept_for_backward
        self.was_called = False
        self.num_calls = 0
        self._full, self._memory = allocate_weights(weights)
        self._weights_by_group: dict[Group, list[ShardedWeight]] = {}
        for p in sorted(self._full, key=is_reduced_by_optimizer):  # experts last: the first message is to all replicas
            weight = ShardedWeight(self._full[p], weights[p].shard, weights[p].partition)
            self._weights_by_group.setdefault(group_of(p), []).append(weight)
        self._num_grads = self._num_expected_grads = 0
        self.is_gathered = True
        self.free()

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        return self._full

    def gather(self) -> None:
        """Gather the full weights if they are not gathered. Collective over the replicas."""
        if not self.is_gathered:
            self.finish(self.start())

    def start(self, note: Sequence[int] = ()) -> Iterator[Gather]:
        """Yield the gathers of the unit's buckets, each started when it is requested. Collective over the replicas.

        Experts are gathered over the ranks that hold the same ones, in buckets of their own after the other weights.

        Args:
            note: integers to send with the first gather.
        """
        for group, weights in self._weights_by_group.items():
            for bucket in buckets_of_weights(weights):
                yield Gather.start(bucket, group, note)
                note = ()

    @torch.no_grad()
    def finish(self, gathers: Iterable[Gather]) -> None:
        """Allocate the full weights and copy the results of ``start`` into them."""
        self.is_gathered = True
        for memory in self._memory:
            memory.untyped_storage().resize_(memory.numel() * memory.element_size())
        for gather in gathers:
            gather.finish()
            del gather  # frees its memory before the next gather allocates
        for parameter, full in self._full.items():
            parameter.data = full

    def free(self) -> None:
        """Free the full weights."""
        self._num_grads = 0
        if not self.is_gathered:
            return
        self.is_gathered = False
        for parameter, full in self._full.items():
            parameter.data = full.new_full((), torch.nan).expand(full.shape)
        for memory in self._memory:
            memory.untyped_storage().resize_(0)

    def count_grad(self) -> None:
        """Count a weight gradient that backward has computed; free the weights after the last gradient."""
        if not self._num_grads:
            self._num_expected_grads = sum(map(backward_state.will_reach, self._full))
        self._num_grads += 1
        if self._num_grads >= self._num_expected_grads and not self.num_calls:
            self.free()

    def num_bytes(self) -> int:
        """Return the full weights' size in bytes."""
        return sum(full.nbytes for full in self._full.values())

    def storages(self) -> Iterator[int]:
        """Yield the storage addresses of the full weights."""
        return (memory.untyped_storage().data_ptr() for memory in self._memory)


class ParamUnits:
    """The units of a model, with the hooks that gather and free them.

    Args:
        module: the model, or a pipeline stage. Tensors that the outermost forward saves for backward are tracked.
        weights: the sharded weights. Other weights are not changed.
        group: the replicas.
        group_of: returns the group over which a weight is sharded; None: ``group`` for all.
        prefetches: gather the next unit early if the order is known and there are several replicas.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: Mapping[nn.Parameter, ShardedWeight],
        group: Group,
        group_of: Callable[[torch.Tensor], Group] | None = None,
        *,
        prefetches: bool = True,
    ) -> None:
        sharded = {parameter: weights[parameter] for parameter in module.parameters() if parameter in weights}
        self.units: list[Unit] = []
        self._units_of: dict[nn.Module, list[Unit]] = {}
        self._unit_by_address: dict[int, Unit] = {}  # by the address of a storage
        self._depth = 0
        self._saved_tensors_hooks: saved_tensors_hooks | None = None
        self._module, self._is_stage = module, is_stage(module)
        self._group_of = (lambda _: group) if group_of is None else group_of
        self._names = {inner: name for name, inner in module.named_modules()}
        self._has_warned = False
        layers = called_layers(module, sharded)
        for layer, layer_weights in layers.items():
            self._add(weight_reader(layer), self._names[layer], {p: sharded[p] for p in layer_weights})
        in_layers = {p for layer_weights in layers.values() for p in layer_weights}
        other_weights = {p: w for p, w in sharded.items() if p not in in_layers}
        self._chunk_units: list[list[Unit]] = []  # per chunk of a stage: gathered when its forward starts
        self._last_units: list[set[Unit]] = []  # per chunk of a stage: of the last layer
        self._retained: set[Unit] = set()  # freed when the action ends
        self._chunk = 0
        self._recomputes = self._is_stage and bool(getattr(module, "activation_checkpoint_interval", 0))
        if self._is_stage:
            self._add_stage_units(other_weights)
        else:
            self._add(module, OTHER_WEIGHTS, other_weights, is_kept_for_backward=True)
        self._unit_idx = {unit: idx for idx, unit in enumerate(self.units)}
        self._pass_types = {inner: TRAINING + 1 + idx for idx, inner in enumerate(module.modules())}
        self._action_types: dict[tuple[str, int, bool], int] = {}
        self._is_in_action = False
        self._keeps_all = False
        device = next((weight.device for weight in sharded), torch.device("cpu"))
        self._order = GatherOrder(group, self.units, device, prefetches=prefetches and group.size > 1)
        self._hook(module)
        self._log_largest()

    def begin_action(self, action_type: str, chunk: int) -> None:
        """Begin an action of a pipeline schedule, which must be the same on all replicas. Collective.

        Args:
            action_type: name of the type, such as "Forward".
        """
        if self._keeps_all:
            return
        self.end_action()
        key = action_type, chunk, torch.is_grad_enabled()
        first_type = TRAINING + 1 + len(self._pass_types)
        self._order.begin_action(self._action_types.setdefault(key, first_type + len(self._action_types)))
        self._is_in_action, self._chunk = True, chunk
        if self._recomputes and action_type not in (FORWARD, DEFERRED):
            self._retain(self._chunk_units[chunk])

    def end_action(self) -> None:
        """Free all weights at the end of an action of a pipeline schedule. Collective over the replicas."""
        if self._keeps_all:
            return
        if self._order.pass_type is not None:
            self._order.end()
        self._is_in_action = False
        self.free()

    @contextmanager
    def forward_scope(self) -> Iterator[None]:
        """Treat the block as part of the model's forward: backward gathers the weights that it has saved."""
        self._enter_forward()
        try:
            yield
        finally:
            self._leave_forward()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather all weights within the block, for code that calls layers directly. Collective over the replicas."""
        if self._is_in_action:
            self.end_action()
        self._order.drop()
        self._keeps_all = True
        for unit in self.units:
            unit.num_calls += 1  # no call within the block frees it
            unit.gather()
        try:
            yield
        finally:
            self._keeps_all = False
            for unit in self.units:
                unit.num_calls -= 1
            self.free()

    def free(self) -> None:
        """Free all gathered and prefetched weights. Must be called on all replicas."""
        self._order.drop()
        self._retained = set()
        for unit in self.units:
            self._free(unit)

    def end_micro_batch(self) -> None:
        """Free all weights after a micro-batch. Collective over the replicas."""
        self._order.end()
        self.free()

    def check(self) -> None:
        """Check that the replicas have gathered the same units, before gradients are used. Collective.

        Raises:
            ConfigError: the replicas have gathered different units; raised on every replica.
        """
        self._order.check()

    def _add(
        self,
        module: nn.Module,
        name: str,
        weights: dict[nn.Parameter, ShardedWeight],
        *,
        is_kept_for_backward: bool = False,
    ) -> None:
        if not weights:
            return
        unit = Unit(name, weights, self._group_of, is_kept_for_backward=is_kept_for_backward)
        self.units.append(unit)
        self._units_of.setdefault(module, []).append(unit)
        for parameter in unit.parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: self._count_grad(unit))

    def _add_stage_units(self, other_weights: dict[nn.Parameter, ShardedWeight]) -> None:
        """Add the units of weights that no single layer of a pipeline stage owns, and list the units of each chunk."""
        stage: Any = self._module
        chunks_of = kept_weights(stage, [*other_weights, *(p for unit in self.units for p in unit.parameters)])
        for chunks in dict.fromkeys(chunks_of[p] for p in other_weights):
            weights = {p: w for p, w in other_weights.items() if chunks_of[p] == chunks}
            self._add(nn.Module(), OTHER_WEIGHTS, weights)
        for chunk in range(stage.chunks):
            kept = [unit for unit in self.units if any(chunk in chunks_of.get(p, ()) for p in unit.parameters)]
            last_layer = stage.layers_of(chunk)[-1]
            last_units = self._units_of.get(last_layer, []) if isinstance(last_layer, nn.Module) else []
            self._chunk_units.append(kept)
            self._last_units.append(set(last_units))

    def _hook(self, module: nn.Module) -> None:
        """Hook all unit modules, and every module that directly contains a unit's weight."""
        unit_of = {parameter: unit for unit in self.units for parameter in unit.parameters}
        for inner in module.modules():
            direct_units = [unit_of[p] for p in inner.parameters(recurse=False) if p in unit_of]
            units = list(dict.fromkeys([*self._units_of.get(inner, []), *direct_units]))
            if units or inner is module:
                inner.register_forward_pre_hook(
                    partial(self._before_forward, units), prepend=True
                )  # other hooks read weights
                inner.register_forward_hook(partial(self._after_forward, units), always_call=True)

    def _enter_forward(self) -> None:
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled() and not backward_state.is_running():
            self._saved_tensors_hooks = saved_tensors_hooks(self._pack, self._unpack)
            self._saved_tensors_hooks.__enter__()

    def _leave_forward(self) -> bool:
        """Return True if the outermost forward with gradients ends."""
        self._depth -= 1
        if self._depth or self._saved_tensors_hooks is None:
            return False
        self._saved_tensors_hooks.__exit__()
        self._saved_tensors_hooks = None
        return True

    def _before_forward(self, units: list[Unit], module: nn.Module, inputs: Any) -> None:
        is_outermost = self._depth == 0 and not backward_state.is_running()
        if is_outermost and not self._keeps_all and not self._is_in_action:
            self._order.begin(TRAINING if torch.is_grad_enabled() else self._pass_types[module])
        if module is self._module and self._is_stage and not self._keeps_all:
            self._chunk = inputs[1] if len(inputs) > 1 else 0
            self._retain(self._chunk_units[self._chunk])
            self._retained |= self._last_units[self._chunk]
        elif self._recomputes and self._is_in_action and not self._retained and backward_state.is_running():
            self._retain(self._chunk_units[self._chunk])  # deferred work recomputes layers
        for unit in units:
            unit.num_calls += 1
            unit.was_called = True
            self._gather(unit)
        self._enter_forward()

    def _after_forward(self, units: list[Unit], module: nn.Module, inputs: Any, output: Any) -> None:
        if self._leave_forward() and module is self._module and not self._is_stage:
            self._warn_uncalled(output)
        if self._depth == 0 and not (self._is_in_action or torch.is_grad_enabled()):
            self._free_retained()
        for unit in units:
            unit.num_calls -= 1
            if not (
                unit.num_calls
                or unit in self._retained
                or backward_state.is_running()
                or (unit.is_kept_for_backward and torch.is_grad_enabled())
            ):
                self._free(unit)
        has_failed = output is None
        if self._depth == 0 and self._order.pass_type == self._pass_types[module] and not has_failed:
            self._order.end()

    def _retain(self, units: Iterable[Unit]) -> None:
        """Gather ``units`` and keep them until the action ends."""
        self._retained = set(units)
        for unit in units:
            unit.was_called = True
            self._gather(unit)

    def _free_retained(self) -> None:
        """Free the units retained by a forward that is not an action of a schedule."""
        retained, self._retained = self._retained, set()
        for unit in retained:
            if not (unit.num_calls or backward_state.is_running()):
                self._free(unit)

    def _log_largest(self) -> None:
        unit_bytes = [unit.num_bytes() for unit in self.units]
        if not unit_bytes:
            return
        largest, total = self.units[unit_bytes.index(max(unit_bytes))].name, sum(unit_bytes)
        message = (
            f"ZeRO 3 gathers {len(unit_bytes)} units, the largest with {max(unit_bytes) / total:.0%} of the "
            f"weights: {largest}"
        )
        if max(unit_bytes) > LARGE_UNIT_FRACTION * total and not self._is_stage:
            log.warn_once(f"{message}. They are gathered at once: put layers in a ModuleList to gather them one by one")
        else:
            log.info(message)

    def _warn_uncalled(self, output: Any) -> None:
        """After the first forward of the model with gradients, name the layers that it has not called."""
        names = [unit.name for unit in self.units if not unit.was_called]
        if names and not self._has_warned and output is not None:  # None: the forward has failed
            log.warning(
                f"--zero-stage 3 gathers weights when their module is called, but {', '.join(names)} was not called in "
                "the first forward. If its weights were read there, they were NaN. Call the module, or use "
                "--zero-stage 2"
            )
        self._has_warned = self._has_warned or output is not None

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Pack a saved tensor for the graph.

        A weight is packed with its unit, because it may be freed before backward.
        """
        if tensor.layout is not torch.strided:  # sparse tensors have no single storage and are never weights
            return tensor.detach()
        unit = self._unit_by_address.get(tensor.untyped_storage().data_ptr())
        return tensor.detach() if unit is None else (unit, tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        unit, tensor = packed
        if not unit.is_gathered and self._is_in_action:
            self._free_unreached()
        self._gather(unit)
        return tensor

    def _free_unreached(self) -> None:
        """Free units that get no gradient in the running backward, because the schedule defers their gradients."""
        for unit in self.units:
            is_in_use = unit.num_calls or unit in self._retained
            if unit.is_gathered and not is_in_use and not any(map(backward_state.will_reach, unit.parameters)):
                self._free(unit)

    def _count_grad(self, unit: Unit) -> None:
        if unit in self._retained:
            return
        unit.count_grad()
        if not unit.is_gathered:
            self._remove_addresses(unit)

    def _gather(self, unit: Unit) -> None:
        if not unit.is_gathered:
            self._order.gather(self._unit_idx[unit])
            self._unit_by_address.update(dict.fromkeys(unit.storages(), unit))

    def _free(self, unit: Unit) -> None:
        if unit.is_gathered:
            self._remove_addresses(unit)
        unit.free()

    def _remove_addresses(self, unit: Unit) -> None:
        self._unit_by_address = {
            address: other for address, other in self._unit_by_address.items() if other is not unit
        }
