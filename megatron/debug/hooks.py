"""Hooks that show each tensor that modules take and give in training, and its gradient, in the order of the run.

| what | when | of which modules |
|---|---|---|
| input | ahead of a forward | those without modules within |
| output | behind it | all |
| grad_output | once the gradient of an output is complete | all |
| grad_input | once a module's own part of the gradient of an input is complete | all |

The numbers of the run stay as they are. A module gets views of its inputs in place of these, so that what it sends back
is told apart from what others add. Neither a forward that backward runs again, to recompute, is shown nor an
evaluation.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from megatron.debug.cuts import Cut, input_cut, output_cut

INPUT, OUTPUT, GRAD_OUTPUT, GRAD_INPUT = "input", "output", "grad_output", "grad_input"
LAST_ONES = 8
"""Outputs among which the model's own is looked for."""


Place = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Seen:
    """Which tensor this is.

    ``call`` counts the calls of modules of this name on a micro-batch, ``index`` the tensors among what it takes or
    gives, and ``is_boundary`` says that it is the first tensor of a pass, or the gradient of what the model returns.
    """

    name: str
    what: str
    micro_batch: int
    call: int
    index: int
    cut: Cut | None
    is_boundary: bool = False

    @property
    def place(self) -> Place:
        return self.name, self.micro_batch, self.call, self.index


Sight = Callable[[Seen, torch.Tensor], None]


class Watch:
    """Shows ``see`` what passes through ``modules`` while it is on.

    Args:
        model: what is called with a stage's, or chunk's, input.
        micro_batch: returns the number of the one in work, in a recomputed forward that of the first time.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[tuple[str, nn.Module]],
        micro_batch: Callable[[], int],
        see: Sight,
    ) -> None:
        self._model, self._modules = model, modules
        self._micro_batch, self._see = micro_batch, see
        self._handles: list[Any] = []
        self._calls: dict[bool, Counter[tuple[str, int]]] = {False: Counter(), True: Counter()}  # recomputed or not
        self._is_first = False
        self._last: deque[tuple[Place, torch.Tensor]] = deque(maxlen=LAST_ONES)
        self._boundary: set[Place] = set()

    def start(self) -> None:
        """Look from now on."""
        for calls in self._calls.values():
            calls.clear()
        self._boundary.clear()
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
        self._is_first = True

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        """Note which of the last outputs leave the model."""
        leaving = {id(tensor) for _, tensor in tensors_in(output)}
        self._boundary.update(key for key, tensor in self._last if id(tensor) in leaving)
        self._last.clear()

    def _before(self, name: str, module: nn.Module, args: Any) -> Any:
        if not module.training:
            return None
        micro_batch, is_again = self._micro_batch(), is_recomputing()
        call = self._calls[is_again][name, micro_batch]
        if not is_again and next(module.children(), None) is None:
            for index, tensor in tensors_in(args):
                self._show_forward(Seen(name, INPUT, micro_batch, call, index, input_cut(module, tensor)), tensor)
        if not torch.is_grad_enabled():
            return None
        numbers = count()

        def alias(x: torch.Tensor) -> torch.Tensor:
            index = next(numbers)
            if not x.requires_grad:
                return x
            view = x.view_as(x)
            view.register_hook(
                partial(self._show, Seen(name, GRAD_INPUT, micro_batch, call, index, input_cut(module, x)))
            )
            return view

        return replaced(args, alias)

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not module.training:
            return
        micro_batch, is_again = self._micro_batch(), is_recomputing()
        call = self._calls[is_again][name, micro_batch]
        self._calls[is_again][name, micro_batch] += 1
        has_ids = any(not tensor.is_floating_point() for tensor in args if isinstance(tensor, torch.Tensor))
        for index, tensor in tensors_in(output):
            seen = Seen(name, OUTPUT, micro_batch, call, index, output_cut(module, tensor, has_ids))
            if not is_again:
                self._last.append((seen.place, tensor))
                self._show_forward(seen, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._show_of_output, replace(seen, what=GRAD_OUTPUT)))

    def _show_forward(self, seen: Seen, tensor: torch.Tensor) -> None:
        is_boundary, self._is_first = self._is_first, False
        self._see(replace(seen, is_boundary=is_boundary), tensor.detach())

    def _show_of_output(self, seen: Seen, gradient: torch.Tensor) -> None:
        self._show(replace(seen, is_boundary=seen.place in self._boundary), gradient)

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
