"""Which module made the first number that is not finite, told at the end of a step, with one question to the device.

| first tensor with such a number, in the order of the run | made by |
|---|---|
| an output or the gradient that a module sends back | that module |
| an input or the gradient of an output | what lies between the module and the one before it, such as a sum |
| what comes to the model, the gradient of what it returns | another stage, or the data; the loss |
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron.debug.hooks import GRAD_INPUT, GRAD_OUTPUT, OUTPUT, Seen

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
