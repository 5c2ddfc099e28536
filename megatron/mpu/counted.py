"""Dropout whose masks are the same in every layout: each element's fate is a hash of what it is, not of who holds it.

The key of the hash is made of seed, step, layer and site; its counter says which element of the whole tensor of the
global batch this is, and four neighbouring columns share one counter:

| word | hidden states [s, b, h] | attention probabilities [b, a, s, s_k] |
|---|---|---|
| 0 | column // 4 | key // 4 |
| 1 | position | query |
| 2 | sample in the global batch | the same |
| 3 | 0 | head |

Which rank, stage, replica or micro-batch works on it is nowhere in there. Samples are dealt as
``megatron.data.batches`` says: sample j of micro-batch i on replica r is number (r m + i) b + j of the global batch,
with m micro-batches of b samples on each replica.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.philox import philox
from megatron.mpu.random import DropoutStreams

LANES = 4
"""Columns that share a counter."""
BLOCK = {"cpu": 2**14, "cuda": 2**24}
"""Counters that are worked on at a time: on a CPU as many as its caches hold, elsewhere few enough for its memory."""


class CountedDropout(DropoutStreams):
    """The source of all dropout masks of one rank, in any layout.

    Args:
        micro_batch_size: samples in each forward, to see that the tensors are what they must be.
        seed, data, tensor: as of ``DropoutStreams``.
    """

    def __init__(self, micro_batch_size: int, seed: int = 0, data: Group = SINGLE, tensor: Group = SINGLE) -> None:
        super().__init__(seed, data, tensor)
        self.micro_batch_size = micro_batch_size

    def key(self, layer: int, site: str, is_cut: bool) -> int:
        """Return the key of the hash, the same on all ranks; cut or not is the same mask."""
        place = (self.seed, self.position.step, layer, site)
        return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=8).digest(), "little")

    def generator(self, device: torch.device, layer: int, site: str, is_cut: bool) -> NoReturn:
        """Raise RuntimeError: what a generator draws depends on the layout."""
        raise RuntimeError(
            "with --layout-independent-dropout there is no generator to draw from, got a call of streams.generator. "
            "Use streams.dropout, or leave the flag out"
        )

    def dropout(
        self,
        x: torch.Tensor,
        probability: float,
        *,
        training: bool,
        layer: int,
        site: str,
        is_cut: bool = False,
        is_part: bool = False,
    ) -> torch.Tensor:
        """Return ``x`` with elements dropped by the mask that belongs to them.

        Shapes:
            x, output [s, b, h], or [s, b, h/t] where ``is_cut``, or [s/t, b, h] where ``is_part``

        Raises:
            ValueError: ``x`` has other dimensions than these.
        """
        if not training or probability == 0.0:
            return x
        if x.dim() != 3 or x.shape[1] != self.micro_batch_size:
            raise ValueError(
                "with --layout-independent-dropout a tensor must be [sequence, micro-batch, hidden], so that its "
                f"samples are known, got {tuple(x.shape)} at {site!r} with --batch-size {self.micro_batch_size}. "
                "Bring it into that shape, or leave the flag out"
            )
        length, samples, width = x.shape
        mask = dropped_mask(
            self.key(layer, site, is_cut),
            probability,
            rows=_range(length, x.device, self.tensor_rank * length if is_part else 0).view(-1, 1, 1),
            samples=self._samples(x.device).view(-1, 1),
            planes=_range(1, x.device),
            columns=_columns(self.tensor_rank * width if is_cut else 0, width),
        )
        return _without(x, mask, probability)

    def attend(
        self,
        function: Callable[..., torch.Tensor],
        probability: float,
        *,
        device: torch.device,
        layer: int,
        site: str,
        is_cut: bool,
    ) -> torch.Tensor:
        """Return what ``function`` gives with the probabilities dropped that belong to this place."""
        key, samples = self.key(layer, site, is_cut), self._samples(device)  # now: the position may move on
        drop = partial(self._drop_probabilities, probability=probability, key=key, samples=samples, is_cut=is_cut)
        return function(drop=drop)

    def _drop_probabilities(
        self, x: torch.Tensor, *, probability: float, key: int, samples: torch.Tensor, is_cut: bool
    ) -> torch.Tensor:
        """Return ``x`` with elements dropped.

        Shapes:
            x, output [b, a/t, s, s_k]
        """
        _, heads, queries, keys = x.shape
        mask = dropped_mask(
            key,
            probability,
            rows=_range(queries, x.device).view(-1, 1),
            samples=samples.view(-1, 1, 1, 1),
            planes=_range(heads, x.device, self.tensor_rank * heads if is_cut else 0).view(-1, 1, 1),
            columns=_columns(0, keys),
        )
        return _without(x, mask, probability)

    def _samples(self, device: torch.device) -> torch.Tensor:
        """Return the numbers of the samples of this micro-batch within the global batch."""
        at = self.position
        before = self.data_rank * at.num_micro_batches + at.micro_batch
        return _range(self.micro_batch_size, device, before * self.micro_batch_size)


def dropped_mask(
    key: int, probability: float, *, rows: torch.Tensor, samples: torch.Tensor, planes: torch.Tensor, columns: range
) -> torch.Tensor:
    """Return which elements are dropped, True for those with a random word below ``probability`` of all words.

    Shapes:
        rows, samples, planes: int64 coordinates [..., 1] that broadcast against each other; rows has a size above 1 in
            one dimension, its first
        output: bool [..., number of columns]
    """
    threshold = round(probability * 2**32)
    groups = torch.arange(columns.start // LANES, -(-columns.stop // LANES), device=rows.device)
    others = groups.numel() * samples.numel() * planes.numel()
    parts = []
    for part in rows.split(max(1, BLOCK.get(rows.device.type, BLOCK["cuda"]) // others)):
        words = philox((groups, part, samples, planes), key)
        parts.append(torch.stack([word < threshold for word in words], dim=-1).flatten(-2))  # [..., 4 groups]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-rows.dim())
    return whole[..., columns.start % LANES :][..., : len(columns)]


def _without(x: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    return (x * (1.0 / (1.0 - probability))).masked_fill_(mask, 0.0)


def _columns(start: int, size: int) -> range:
    return range(start, start + size)


def _range(size: int, device: torch.device, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + size, device=device)
