"""Hooks on modules; the module that made the first NaN."""

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

# Hooks that show each tensor that modules take and give in training, and its gradient, in the order of the run.
#
# | what | when | of which modules |
# |---|---|---|
# | input | ahead of a forward | those without modules within |
# | output | behind it | all |
# | grad_output | once the gradient of an output is complete | all |
# | grad_input | once a module's own part of the gradient of an input is complete | all |
#
# What comes to the model, and the gradients that come to what it returns, are shown apart, ahead of all modules: the
# boundary. A weight that a module is given or returns is none of its inputs and outputs.
#
# The numbers of the run stay as they are. A module gets views of its inputs in place of these, so that what it sends
# back is told apart from what others add. Neither a forward that backward runs again, to recompute, is shown nor an
# evaluation.

INPUT, OUTPUT, GRAD_OUTPUT, GRAD_INPUT = "input", "output", "grad_output", "grad_input"
LAST_ONES = 8
"""Outputs among which the model's own is looked for."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Which tensor this is.

    ``call`` counts the calls of modules of this name on a micro-batch, ``index`` the tensors among what it takes or
    gives, and ``is_boundary`` says that it comes to the model, or to what it returns, which ``name`` has made.
    ``is_share``: it is this rank's summand of what the tensor group sums later.
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
    """Shows ``see`` what passes through ``modules`` while it is on.

    Args:
        model: what is called with a stage's, or chunk's, input.
        micro_batch: returns the number of the one in work, in a recomputed forward that of the first time.
        chunk: returns the number of the chunk that runs, of what the model is called with.
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
        """Look from now on."""
        for calls in self._calls.values():
            calls.clear()
        self._chunks.clear()
        self._handles.append(self._model.register_forward_pre_hook(self._enter))
        for name, module in self._modules:
            self._handles.append(module.register_forward_pre_hook(partial(self._before, name)))
            self._handles.append(module.register_forward_hook(partial(self._after, name)))
        self._handles.append(self._model.register_forward_hook(self._leave))

    def stop(self) -> None:
        """Look no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._last.clear()

    def _enter(self, model: nn.Module, args: Any) -> None:
        """Show what comes to the model."""
        if not model.training or is_recomputing():
            return
        self._chunk = self._chunk_of(args)
        for index, tensor in tensors_in(args):
            seen = Seen("", INPUT, self._micro_batch(), 0, index, None, is_boundary=True, chunk=self._chunk)
            self._see(seen, tensor.detach())

    def _leave(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Return views of what leaves the model: the gradient of one is what comes to it, and nothing else."""
        names = {id(tensor): name for name, tensor in self._last}
        self._last.clear()
        if not model.training or not torch.is_grad_enabled():
            return None
        numbers, micro_batch = count(), self._micro_batch()

        def alias(x: torch.Tensor) -> torch.Tensor:
            index = next(numbers)
            if not x.requires_grad:
                return x
            view = x.view_as(x)
            name = names.get(id(x), "the model")
            seen = Seen(name, GRAD_OUTPUT, micro_batch, 0, index, None, is_boundary=True, chunk=self._chunk)
            view.register_hook(partial(self._show, seen))
            return view

        return replaced(output, alias)

    def _before(self, name: str, module: nn.Module, args: Any) -> Any:
        if not module.training:
            return None
        micro_batch, is_again = self._micro_batch(), is_recomputing()
        call = self._calls[is_again][name, micro_batch]
        chunk = self._chunk_at(name, micro_batch, call, is_again)
        if not is_again and next(module.children(), None) is None:
            for index, tensor in tensors_in(args):
                seen = Seen(name, INPUT, micro_batch, call, index, input_cut(module, tensor, index), chunk=chunk)
                self._see(seen, tensor.detach())
        if not torch.is_grad_enabled():
            return None
        numbers = count()

        def alias(x: torch.Tensor) -> torch.Tensor:
            index = next(numbers)
            if not x.requires_grad:
                return x
            view = x.view_as(x)
            cut, share = input_cut(module, x, index), is_share(module, index)
            seen = Seen(name, GRAD_INPUT, micro_batch, call, index, cut, chunk=chunk, is_share=share)
            view.register_hook(partial(self._show, seen))
            return view

        return replaced(args, alias)

    def _chunk_at(self, name: str, micro_batch: int, call: int, is_again: bool) -> int:
        """Return the chunk that made this call the first time."""
        if is_again:
            return self._chunks.get((name, micro_batch, call), 0)
        self._chunks[name, micro_batch, call] = self._chunk
        return self._chunk

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not module.training:
            return
        micro_batch, is_again = self._micro_batch(), is_recomputing()
        call = self._calls[is_again][name, micro_batch]
        self._calls[is_again][name, micro_batch] += 1
        chunk = self._chunk_at(name, micro_batch, call, is_again)
        has_ids = any(not tensor.is_floating_point() for tensor in args if isinstance(tensor, torch.Tensor))
        for index, tensor in tensors_in(output):
            seen = Seen(name, OUTPUT, micro_batch, call, index, output_cut(module, tensor, has_ids, index), chunk=chunk)
            if not is_again:
                self._last.append((name, tensor))
                self._see(seen, tensor.detach())
            if tensor.requires_grad:
                seen = replace(seen, what=GRAD_OUTPUT, is_share=is_share(module, index, of_output=True))
                handle = tensor.register_hook(partial(self._show, seen))
                if tensor.is_leaf:  # it outlives the step
                    self._handles.append(handle)

    def _show(self, seen: Seen, gradient: torch.Tensor) -> None:
        if self._handles:
            self._see(seen, gradient.detach())


def is_recomputing() -> bool:
    """Return whether this forward runs within a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def tensors_in(value: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (number, tensor) for the floating-point tensors of a structure; numbers count these alone.

    A weight that one module hands to another belongs to no sample; a dump has it as a weight.
    """
    number = 0
    for leaf in _leaves(value):
        if _is_shown(leaf):
            yield number, leaf
            number += 1


def replaced(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the structure with ``change`` of each of its floating-point tensors."""
    if isinstance(value, torch.Tensor):
        return change(value) if _is_shown(value) else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(each, change) for each in value))
    if type(value) in (tuple, list):
        return type(value)(replaced(each, change) for each in value)
    if type(value) is dict:
        return {key: replaced(each, change) for key, each in value.items()}
    return value


def _is_shown(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not isinstance(value, nn.Parameter)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)
    else:
        yield value


# Which module made the first number that is not finite, told at the end of a step, with one question to the device.
#
# | first tensor with such a number, in the order of the run | made by |
# |---|---|
# | an output or the gradient that a module sends back | that module |
# | an input or the gradient of an output | what lies between the module and the one before it, such as a sum |
# | what comes to the model, the gradient of what it returns | another stage, or the data; the loss |

BACKWARD = (GRAD_OUTPUT, GRAD_INPUT)


class Finding(NamedTuple):
    """What was seen first; ``before`` is what was seen ahead of it, still finite.

    ``number`` counts what was seen in the step: the same tensor on all ranks of a tensor group.
    """

    number: int
    seen: Seen
    before: Seen | None
    has_arrived: bool

    @property
    def text(self) -> str:
        """Say who made it."""
        name, what, micro_batch = self.seen.name, self.seen.what, self.seen.micro_batch
        where = f"in the {'backward' if what in BACKWARD else 'forward'} of micro-batch {micro_batch}"
        if what == OUTPUT:
            return f"{name} gave NaN or infinity {where}, having taken only finite numbers"
        if what == GRAD_INPUT:
            return f"{name} sent NaN or infinity back {where}, having got only finite gradients"
        if what == GRAD_OUTPUT and self.seen.is_boundary:
            return f"the loss sent NaN or infinity back to {name} {where}"
        has_before = self.before is not None and not self.before.is_boundary
        before = f"between {self.before.name} and {name}" if self.before and has_before else f"ahead of {name}"
        return f"NaN or infinity was made {before} {where}, outside of modules"


class FiniteCheck:
    """Collects the smallest and the largest number of each tensor of a step: any NaN and any infinity shows there.

    Args:
        has_loss: this rank's model returns what the loss is taken of: its last chunk.
        chunks: of this rank's model.
    """

    def __init__(self, has_loss: bool, chunks: int = 1) -> None:
        self.has_loss, self.chunks = has_loss, chunks
        self._seen: list[Seen] = []
        self._extremes: list[torch.Tensor] = []

    def see(self, seen: Seen, x: torch.Tensor) -> None:
        """Take note of a tensor, as ``hooks.Watch`` shows it."""
        if x.numel():
            self._seen.append(seen)
            self._extremes.append(torch.stack(torch.aminmax(x)))

    def clear(self) -> None:
        """Forget what was seen."""
        self._seen.clear()
        self._extremes.clear()

    def finding(self, *, in_backward: bool = True) -> Finding | None:
        """Return what was seen first since ``clear``, None if all was finite. Waits for the device.

        Args:
            in_backward: gradients count, too.
        """
        if not self._seen:
            return None
        wide = torch.stack([pair.double() for pair in self._extremes])
        for index in (~wide.isfinite().all(1)).nonzero().flatten().tolist():
            seen = self._seen[index]
            if in_backward or seen.what not in BACKWARD:
                before = self._seen[index - 1] if index else None
                return Finding(index, seen, before, seen.is_boundary and not self._is_of_loss(seen))
        return None

    def _is_of_loss(self, seen: Seen) -> bool:
        return seen.what == GRAD_OUTPUT and self.has_loss and seen.chunk == self.chunks - 1
