"""Hooks that report module tensors (ModuleWatcher) and detection of the first NaN (FiniteCheck)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.debug.statistics import ShardSlice, input_slice, is_share, output_slice

# The hooks report module inputs and outputs in training mode, and their gradients, in execution order.
#
# | tensor | reported | modules |
# |---|---|---|
# | input | before forward | modules without submodules |
# | output | after forward | all |
# | grad_output | when an output's gradient is complete | all |
# | grad_input | when the module's contribution to an input's gradient is complete | all |
#
# The model's inputs and its outputs' gradients are boundary tensors. They are reported separately, before
# the module tensors in the same pass. Weights that a module receives or returns are not reported.
#
# The hooks do not change any values. Each module receives views of its inputs, so that its contribution to a gradient
# is separate from other modules' contributions. Recomputed forwards and evaluations are not reported.

INPUT, OUTPUT, GRAD_OUTPUT, GRAD_INPUT = "input", "output", "grad_output", "grad_input"
NUM_LATEST_OUTPUTS = 8
"""Number of most recent module outputs that are checked to find the module that returned the model's output."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Description of a reported tensor.

    ``call`` is the module's call index within the micro-batch. ``index`` is the tensor's index among the
    module's inputs or outputs. ``is_boundary``: the tensor is a model input, or the gradient of a model output
    that module ``name`` produced. ``is_share``: it is this rank's partial sum, which the tensor group reduces later.
    """

    name: str
    tensor_type: str
    micro_batch: int
    call: int
    index: int
    shard_slice: ShardSlice | None
    is_boundary: bool = False
    chunk: int = 0
    is_share: bool = False


OnTensor = Callable[[TensorInfo, torch.Tensor], None]


class ModuleWatcher:
    """Calls ``on_tensor`` for all inputs and outputs of ``modules`` and their gradients, from ``start`` to ``stop``.

    Args:
        model: the module that is called with the input of a stage or chunk.
        micro_batch: returns the current micro-batch index; a recomputed forward has the original forward's index.
        chunk: returns the current chunk index, given the model's arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[tuple[str, nn.Module]],
        micro_batch: Callable[[], int],
        on_tensor: OnTensor,
        chunk: Callable[[tuple[Any, ...]], int] = lambda args: 0,
    ) -> None:
        self._model, self._modules = model, modules
        self._micro_batch, self._on_tensor, self._chunk_of = micro_batch, on_tensor, chunk
        self._handles: list[Any] = []
        self._calls: dict[bool, Counter[tuple[str, int]]] = {False: Counter(), True: Counter()}  # by is_recomputed
        self._latest_outputs: deque[tuple[str, torch.Tensor]] = deque(maxlen=NUM_LATEST_OUTPUTS)
        self._chunk = 0
        self._chunks: dict[tuple[str, int, int], int] = {}  # by (name, micro-batch, call)

    def start(self) -> None:
        """Register the hooks."""
        for calls in self._calls.values():
            calls.clear()
        self._chunks.clear()
        self._handles.append(self._model.register_forward_pre_hook(self._before_model))
        for name, module in self._modules:
            self._handles.append(module.register_forward_pre_hook(partial(self._before_module, name)))
            self._handles.append(module.register_forward_hook(partial(self._after_module, name)))
        self._handles.append(self._model.register_forward_hook(self._after_model))

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._latest_outputs.clear()

    def _before_model(self, model: nn.Module, args: Any) -> None:
        if not model.training or is_recomputing():
            return
        self._chunk = self._chunk_of(args)
        for index, tensor in tensors_in(args):
            info = TensorInfo("", INPUT, self._micro_batch(), 0, index, None, is_boundary=True, chunk=self._chunk)
            self._on_tensor(info, tensor.detach())

    def _after_model(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Replace the model's outputs by views, with hooks that report the incoming gradients."""
        names = {id(tensor): name for name, tensor in self._latest_outputs}
        self._latest_outputs.clear()
        if not model.training or not torch.is_grad_enabled():
            return None
        indices, micro_batch = count(), self._micro_batch()

        def alias(x: torch.Tensor) -> torch.Tensor:
            index = next(indices)
            if not x.requires_grad:
                return x
            view = x.view_as(x)
            name = names.get(id(x), "the model")
            info = TensorInfo(name, GRAD_OUTPUT, micro_batch, 0, index, None, is_boundary=True, chunk=self._chunk)
            view.register_hook(partial(self._report_gradient, info))
            return view

        return map_tensors(output, alias)

    def _before_module(self, name: str, module: nn.Module, args: Any) -> Any:
        """Report a module's inputs and replace them by views, with hooks that report their gradients."""
        if not module.training:
            return None
        micro_batch, is_recomputed = self._micro_batch(), is_recomputing()
        call = self._calls[is_recomputed][name, micro_batch]
        chunk = self._chunk_of_call(name, micro_batch, call, is_recomputed)
        if not is_recomputed and next(module.children(), None) is None:
            for index, tensor in tensors_in(args):
                info = TensorInfo(
                    name, INPUT, micro_batch, call, index, input_slice(module, tensor, index), chunk=chunk
                )
                self._on_tensor(info, tensor.detach())
        if not torch.is_grad_enabled():
            return None
        indices = count()

        def alias(x: torch.Tensor) -> torch.Tensor:
            index = next(indices)
            if not x.requires_grad:
                return x
            view = x.view_as(x)
            shard_slice, share = input_slice(module, x, index), is_share(module, index)
            info = TensorInfo(name, GRAD_INPUT, micro_batch, call, index, shard_slice, chunk=chunk, is_share=share)
            view.register_hook(partial(self._report_gradient, info))
            return view

        return map_tensors(args, alias)

    def _chunk_of_call(self, name: str, micro_batch: int, call: int, is_recomputed: bool) -> int:
        """Find this call's chunk, or the original forward's if ``is_recomputed``."""
        if is_recomputed:
            return self._chunks.get((name, micro_batch, call), 0)
        self._chunks[name, micro_batch, call] = self._chunk
        return self._chunk

    def _after_module(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Report a module's outputs and register hooks on their gradients."""
        if not module.training:
            return
        micro_batch, is_recomputed = self._micro_batch(), is_recomputing()
        call = self._calls[is_recomputed][name, micro_batch]
        self._calls[is_recomputed][name, micro_batch] += 1
        chunk = self._chunk_of_call(name, micro_batch, call, is_recomputed)
        has_ids = any(not tensor.is_floating_point() for tensor in args if isinstance(tensor, torch.Tensor))
        for index, tensor in tensors_in(output):
            info = TensorInfo(
                name, OUTPUT, micro_batch, call, index, output_slice(module, tensor, has_ids, index), chunk=chunk
            )
            if not is_recomputed:
                self._latest_outputs.append((name, tensor))
                self._on_tensor(info, tensor.detach())
            if tensor.requires_grad:
                info = replace(info, tensor_type=GRAD_OUTPUT, is_share=is_share(module, index, of_output=True))
                handle = tensor.register_hook(partial(self._report_gradient, info))
                if tensor.is_leaf:  # a leaf outlives the step, so stop() must remove the hook
                    self._handles.append(handle)

    def _report_gradient(self, info: TensorInfo, gradient: torch.Tensor) -> None:
        if self._handles:
            self._on_tensor(info, gradient.detach())


def is_recomputing() -> bool:
    """Check if this forward runs within a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def tensors_in(value: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (index, tensor) for each floating-point tensor in a nested structure; the index counts only these tensors.

    Weights that one module passes to another are skipped: they belong to no sample, and dumps record them as weights.
    """
    idx = 0
    for leaf in _leaves(value):
        if _is_reported(leaf):
            yield idx, leaf
            idx += 1


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply ``function`` to each floating-point tensor in a nested structure, except weights."""
    if isinstance(value, torch.Tensor):
        return function(value) if _is_reported(value) else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, function) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


def _is_reported(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not isinstance(value, nn.Parameter)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


# Detect the module that produced the first NaN or infinity. The check runs at the end of a step and needs a single copy
# from the device.
#
# | first non-finite tensor, in execution order | produced by |
# |---|---|
# | an output, or an input's gradient | that module |
# | an input, or an output's gradient | an operation between this module and the previous one, such as a sum |
# | a model input | another stage, or the data |
# | a model output's gradient | another stage, or the loss |

BACKWARD = (GRAD_OUTPUT, GRAD_INPUT)


class Finding(NamedTuple):
    """The first non-finite tensor in a step; ``previous`` is the tensor reported before it.

    ``tensor_idx`` is the tensor's index in the step, which is the same on all ranks in a tensor group.
    """

    tensor_idx: int
    info: TensorInfo
    previous: TensorInfo | None
    is_from_outside: bool

    @property
    def text(self) -> str:
        """Message about the non-finite value's origin."""
        name, tensor_type, micro_batch = self.info.name, self.info.tensor_type, self.info.micro_batch
        pass_text = f"in the {'backward' if tensor_type in BACKWARD else 'forward'} of micro-batch {micro_batch}"
        if tensor_type == OUTPUT:
            return f"{name} returned NaN or infinity {pass_text}, although its inputs were finite"
        if tensor_type == GRAD_INPUT:
            return (
                f"{name} returned a NaN or infinite input gradient {pass_text}, although its output gradients were "
                "finite"
            )
        if tensor_type == GRAD_OUTPUT and self.info.is_boundary:
            return f"the loss returned a NaN or infinite gradient to {name} {pass_text}"
        has_previous_module = self.previous is not None and not self.previous.is_boundary
        location = (
            f"between {self.previous.name} and {name}" if self.previous and has_previous_module else f"before {name}"
        )
        return f"NaN or infinity first appeared {location} {pass_text}, outside of any module"


class FiniteCheck:
    """Collects each tensor's minimum and maximum over a step, which reveal any NaN or infinity.

    Args:
        has_loss: the last chunk on this rank returns the loss input.
        num_chunks: chunk count on this rank.
    """

    def __init__(self, has_loss: bool, num_chunks: int = 1) -> None:
        self.has_loss, self.num_chunks = has_loss, num_chunks
        self._infos: list[TensorInfo] = []
        self._extremes: list[torch.Tensor] = []

    def record(self, info: TensorInfo, x: torch.Tensor) -> None:
        """Record a tensor that ``ModuleWatcher`` reports."""
        if x.numel():
            self._infos.append(info)
            self._extremes.append(torch.stack(torch.aminmax(x)))

    def clear(self) -> None:
        """Discard all records."""
        self._infos.clear()
        self._extremes.clear()

    def first_nonfinite(self, *, in_backward: bool = True) -> Finding | None:
        """Find the first non-finite tensor since ``clear``; None if there is none. Synchronizes with the device.

        Args:
            in_backward: include gradients.
        """
        if not self._infos:
            return None
        extremes = torch.stack([pair.double() for pair in self._extremes])
        for idx in (~extremes.isfinite().all(1)).nonzero().flatten().tolist():
            info = self._infos[idx]
            if in_backward or info.tensor_type not in BACKWARD:
                previous = self._infos[idx - 1] if idx else None
                return Finding(idx, info, previous, info.is_boundary and not self._is_loss_gradient(info))
        return None

    def _is_loss_gradient(self, info: TensorInfo) -> bool:
        """Check if this rank's loss computed the gradient ``info``."""
        return info.tensor_type == GRAD_OUTPUT and self.has_loss and info.chunk == self.num_chunks - 1
