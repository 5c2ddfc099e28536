"""Watch: hooks that report the tensors of modules; FiniteCheck: the module that produced the first NaN."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.debug.statistics import Cut, input_cut, is_share, output_cut

# Hooks that report each input and output of modules in training, and its gradient, in the order of the run.
#
# | tensor | reported | modules |
# |---|---|---|
# | input | before forward | modules without submodules |
# | output | after forward | all |
# | grad_output | when the gradient of an output is complete | all |
# | grad_input | when the module's contribution to the gradient of an input is complete | all |
#
# The inputs of the model and the gradients of its outputs are the boundary. They are reported separately, before the
# tensors of all modules. Weights that a module receives or returns do not count as inputs and outputs.
#
# The values of the run do not change. A module receives views of its inputs, so that its gradients of them are separate
# from the contributions of other modules. Recomputed forwards and evaluations are not reported.

INPUT, OUTPUT, GRAD_OUTPUT, GRAD_INPUT = "input", "output", "grad_output", "grad_input"
LAST_ONES = 8
"""Number of latest outputs among which the model's output is searched."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Description of a reported tensor.

    ``call`` counts the calls of modules of this name on a micro-batch, ``index`` the tensors among a module's inputs or
    outputs. ``is_boundary``: the tensor is an input of the model, or the gradient of an output of the model, which the
    module ``name`` produced. ``is_share``: it is this rank's summand of a sum that the tensor group computes later.
    """

    name: str
    what: str
    micro_batch: int
    call: int
    index: int
    cut: Cut | None
    is_boundary: bool = False
    chunk: int = 0
    is_share: bool = False


Sight = Callable[[Seen, torch.Tensor], None]


class Watch:
    """Calls ``see`` with each tensor that passes through ``modules``, from ``start`` to ``stop``.

    Args:
        model: the module that is called with the input of a stage or chunk.
        micro_batch: returns the index of the current micro-batch; in a recomputed forward, that of the original
            forward.
        chunk: returns the index of the current chunk, given the arguments of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[tuple[str, nn.Module]],
        micro_batch: Callable[[], int],
        see: Sight,
        chunk: Callable[[tuple[Any, ...]], int] = lambda args: 0,
    ) -> None:
        self._model, self._modules = model, modules
        self._micro_batch, self._see, self._chunk_of = micro_batch, see, chunk
        self._handles: list[Any] = []
        self._calls: dict[bool, Counter[tuple[str, int]]] = {False: Counter(), True: Counter()}  # recomputed or not
        self._last: deque[tuple[str, torch.Tensor]] = deque(maxlen=LAST_ONES)
        self._chunk = 0
        self._chunks: dict[tuple[str, int, int], int] = {}  # of (name, micro-batch, call)

    def start(self) -> None:
        """Register the hooks."""
        for calls in self._calls.values():
            calls.clear()
        self._chunks.clear()
        self._handles.append(self._model.register_forward_pre_hook(self._enter))
        for name, module in self._modules:
            self._handles.append(module.register_forward_pre_hook(partial(self._before, name)))
            self._handles.append(module.register_forward_hook(partial(self._after, name)))
        self._handles.append(self._model.register_forward_hook(self._leave))

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._last.clear()

    def _enter(self, model: nn.Module, args: Any) -> None:
        """Report the inputs of the model."""
        if not model.training or is_recomputing():
            return
        self._chunk = self._chunk_of(args)
        for index, tensor in tensors_in(args):
            seen = Seen("", INPUT, self._micro_batch(), 0, index, None, is_boundary=True, chunk=self._chunk)
            self._see(seen, tensor.detach())

    def _leave(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Return views of the model's outputs; hooks on the views report the gradients that arrive from outside."""
        names = {id(tensor): name for name, tensor in self._last}
        self._last.clear()
        if not model.training or not torch.is_grad_enabled():
            return None
        indices, micro_batch = count(), self._micro_batch()

        def alias(x: torch.Tensor) -> torch.Tensor:
            index = next(indices)
            if not x.requires_grad:
                return x
            view = x.view_as(x)
            name = names.get(id(x), "the model")
            seen = Seen(name, GRAD_OUTPUT, micro_batch, 0, index, None, is_boundary=True, chunk=self._chunk)
            view.register_hook(partial(self._show, seen))
            return view

        return replaced(output, alias)

    def _before(self, name: str, module: nn.Module, args: Any) -> Any:
        """Report the inputs of a module; return views of them, with hooks that report their gradients."""
        if not module.training:
            return None
        micro_batch, is_recomputed = self._micro_batch(), is_recomputing()
        call = self._calls[is_recomputed][name, micro_batch]
        chunk = self._chunk_at(name, micro_batch, call, is_recomputed)
        if not is_recomputed and next(module.children(), None) is None:
            for index, tensor in tensors_in(args):
                seen = Seen(name, INPUT, micro_batch, call, index, input_cut(module, tensor, index), chunk=chunk)
                self._see(seen, tensor.detach())
        if not torch.is_grad_enabled():
            return None
        indices = count()

        def alias(x: torch.Tensor) -> torch.Tensor:
            index = next(indices)
            if not x.requires_grad:
                return x
            view = x.view_as(x)
            cut, share = input_cut(module, x, index), is_share(module, index)
            seen = Seen(name, GRAD_INPUT, micro_batch, call, index, cut, chunk=chunk, is_share=share)
            view.register_hook(partial(self._show, seen))
            return view

        return replaced(args, alias)

    def _chunk_at(self, name: str, micro_batch: int, call: int, is_again: bool) -> int:
        """Return the chunk of this call; ``is_again``: the call is a recompute, and the chunk that of its forward."""
        if is_again:
            return self._chunks.get((name, micro_batch, call), 0)
        self._chunks[name, micro_batch, call] = self._chunk
        return self._chunk

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Report the outputs of a module and hook their gradients."""
        if not module.training:
            return
        micro_batch, is_recomputed = self._micro_batch(), is_recomputing()
        call = self._calls[is_recomputed][name, micro_batch]
        self._calls[is_recomputed][name, micro_batch] += 1
        chunk = self._chunk_at(name, micro_batch, call, is_recomputed)
        has_ids = any(not tensor.is_floating_point() for tensor in args if isinstance(tensor, torch.Tensor))
        for index, tensor in tensors_in(output):
            seen = Seen(name, OUTPUT, micro_batch, call, index, output_cut(module, tensor, has_ids, index), chunk=chunk)
            if not is_recomputed:
                self._last.append((name, tensor))
                self._see(seen, tensor.detach())
            if tensor.requires_grad:
                seen = replace(seen, what=GRAD_OUTPUT, is_share=is_share(module, index, of_output=True))
                handle = tensor.register_hook(partial(self._show, seen))
                if tensor.is_leaf:  # a leaf outlives the step
                    self._handles.append(handle)

    def _show(self, seen: Seen, gradient: torch.Tensor) -> None:
        if self._handles:
            self._see(seen, gradient.detach())


def is_recomputing() -> bool:
    """Return True if this forward runs within a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def tensors_in(value: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (index, tensor) for the floating-point tensors of a structure; other values are not counted.

    Weights that one module passes to another are skipped: they belong to no sample, and dumps contain them as weights.
    """
    idx = 0
    for leaf in _leaves(value):
        if _is_shown(leaf):
            yield idx, leaf
            idx += 1


def replaced(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the structure with ``change`` applied to each of its floating-point tensors."""
    if isinstance(value, torch.Tensor):
        return change(value) if _is_shown(value) else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(item, change) for item in value))
    if type(value) in (tuple, list):
        return type(value)(replaced(item, change) for item in value)
    if type(value) is dict:
        return {key: replaced(item, change) for key, item in value.items()}
    return value


def _is_shown(value: Any) -> bool:
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


# The module that produced the first value that is not finite, reported at the end of a step after one read of the
# device.
#
# | first tensor with such a value, in the order of the run | produced by |
# |---|---|
# | an output, or the gradient of an input | that module |
# | an input, or the gradient of an output | an operation between the module and the previous one, such as a sum |
# | an input of the model | another stage, or the data |
# | the gradient of an output of the model | another stage, or the loss |

BACKWARD = (GRAD_OUTPUT, GRAD_INPUT)


class Finding(NamedTuple):
    """The first tensor that is not finite; ``before`` is the preceding tensor, which is finite.

    ``number`` is the index of the tensor in the step, which is the same on all ranks of a tensor group.
    """

    number: int
    seen: Seen
    before: Seen | None
    has_arrived: bool

    @property
    def text(self) -> str:
        """Message that names the origin of the value."""
        name, what, micro_batch = self.seen.name, self.seen.what, self.seen.micro_batch
        when = f"in the {'backward' if what in BACKWARD else 'forward'} of micro-batch {micro_batch}"
        if what == OUTPUT:
            return f"{name} returned NaN or infinity {when}, although its inputs were finite"
        if what == GRAD_INPUT:
            return f"{name} passed NaN or infinity back {when}, although its incoming gradients were finite"
        if what == GRAD_OUTPUT and self.seen.is_boundary:
            return f"the loss passed NaN or infinity back to {name} {when}"
        has_before = self.before is not None and not self.before.is_boundary
        location = f"between {self.before.name} and {name}" if self.before and has_before else f"before {name}"
        return f"NaN or infinity arose {location} {when}, outside of modules"


class FiniteCheck:
    """Collects the minimum and maximum of each tensor of a step, which reveal any NaN and infinity.

    Args:
        has_loss: the last chunk of this rank's model returns the input of the loss.
        chunks: number of chunks of this rank's model.
    """

    def __init__(self, has_loss: bool, chunks: int = 1) -> None:
        self.has_loss, self.chunks = has_loss, chunks
        self._seen: list[Seen] = []
        self._extremes: list[torch.Tensor] = []

    def see(self, seen: Seen, x: torch.Tensor) -> None:
        """Record a tensor that ``Watch`` reports."""
        if x.numel():
            self._seen.append(seen)
            self._extremes.append(torch.stack(torch.aminmax(x)))

    def clear(self) -> None:
        """Discard all records."""
        self._seen.clear()
        self._extremes.clear()

    def finding(self, *, in_backward: bool = True) -> Finding | None:
        """Return the first tensor since ``clear`` that is not finite; None if all are finite. Waits for the device.

        Args:
            in_backward: include gradients.
        """
        if not self._seen:
            return None
        extremes = torch.stack([pair.double() for pair in self._extremes])
        for idx in (~extremes.isfinite().all(1)).nonzero().flatten().tolist():
            seen = self._seen[idx]
            if in_backward or seen.what not in BACKWARD:
                before = self._seen[idx - 1] if idx else None
                return Finding(idx, seen, before, seen.is_boundary and not self._is_of_loss(seen))
        return None

    def _is_of_loss(self, seen: Seen) -> bool:
        """Return True if ``seen`` is a gradient that this rank's loss has computed."""
        return seen.what == GRAD_OUTPUT and self.has_loss and seen.chunk == self.chunks - 1
