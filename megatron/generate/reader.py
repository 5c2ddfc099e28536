"""A model that reads tokens and remembers them: what the two families share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from megatron.generate.part import Part
from megatron.generate.relay import relay
from megatron.model.cache import LayerCache, Slots
from megatron.model.head import Head, Logits, whole_logits


class Reader(ABC):
    """Reads rows of tokens, a pass at a time, and keeps keys and values of what it has read.

    Args:
        capacity: tokens that the longest row will have.
        body: numbers of the units from embedding to last layer; norm and head follow.
    """

    def __init__(self, part: Part, capacity: int, body: range) -> None:
        self.part, self.body = part, body
        self.slots = Slots(capacity)
        self.caches = {number: LayerCache(self.slots) for number in body[1:] if number in part.units}

    def read(self, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor) -> torch.Tensor | None:
        """Return the logits behind token ``last`` of each row on the last stage, None elsewhere. Collective.

        Shapes:
            tokens, positions [b, s], the same on every rank of the replica; the first pass starts at position 0
            last   [b] indices into ``tokens``
            output [b, v/t]
        """
        device, h = self.part.device, self.part.sizes.hidden_size
        b, s = tokens.shape
        self.tokens, self.positions = tokens.to(device), positions.to(device)
        self.slots.advance(self.positions)
        x = relay(self.part, self.body, self._apply, (s, b, h))  # [s, b, h]
        if x is not None:
            x = x[last.to(device), torch.arange(b, device=device)].unsqueeze(0)  # [1, b, h]
        tail, stage = range(self.body.stop, self.body.stop + 2), self.part.stages[self.body[-1]]
        logits = relay(self.part, tail, self._apply, (1, b, h), x, held_by=stage)  # [1, b, v/t]
        return None if logits is None else logits[0]

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows only."""
        chosen = torch.tensor(rows, device=self.part.device)
        for cache in self.caches.values():
            cache.keep(chosen)

    def _apply(self, number: int, x: torch.Tensor | None) -> torch.Tensor:
        unit = self.part.units[number]
        if number == self.body.start:
            return self.embedded(unit)
        assert x is not None
        if number in self.body:
            return self.layer(number, unit, x)
        if number == self.body.stop:
            return getattr(unit, "norm", unit)(x)
        return whole_logits(unit(x) if isinstance(unit, Head) else self.tied_logits(x, unit.word.weight))

    @abstractmethod
    def embedded(self, unit: torch.nn.Module) -> torch.Tensor:
        """Return the hidden states [s, b, h] of ``self.tokens`` at ``self.positions``."""

    @abstractmethod
    def layer(self, number: int, unit: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [s, b, h] after this layer."""

    @abstractmethod
    def tied_logits(self, x: torch.Tensor, weight: torch.Tensor) -> Logits:
        """Return the logits [s, b, v/t] of a head that is the word table."""
