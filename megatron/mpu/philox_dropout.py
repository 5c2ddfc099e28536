"""PhiloxDropout: dropout masks that are the same in every layout (``--layout-independent-dropout``).

The key of the hash is derived from seed, step, layer and site. The counter identifies an element in the global batch's
full tensor; four neighbouring columns share a counter:

| word | hidden states [s, b, h] | attention probabilities [b, a, s, s_k] |
|---|---|---|
| 0 | column // 4 | key // 4 |
| 1 | position | query |
| 2 | sample in the global batch | sample in the global batch |
| 3 | 0 | head |

Neither key nor counter depends on the rank, stage, replica or micro-batch. Samples are numbered as
``megatron.data.data_loader`` distributes them: sample j in micro-batch i on replica r is sample (r m + i) b + j in the
global batch, with m micro-batches of b samples on each replica. If replicas have different numbers of micro-batches, or
run them in turn, ``DropoutKey.first_micro_batch`` replaces r m. If samples are split into shorter sequences
(--seq-length-schedule), the sequences are numbered instead of the samples, and b counts sequences per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NoReturn

import torch

from megatron.mpu import fused_dropout
from megatron.mpu.context_parallel import TokenRange, clip_ranges, token_ranges
from megatron.mpu.fused_dropout import Mask
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.philox import philox
from megatron.mpu.random import DropoutKey, DropoutStreams, add_residual
from megatron.mpu.random_key import hash_key

LANES = 4
"""Number of columns that share a counter."""
CHUNK_COUNTERS = {"cpu": 2**14, "cuda": 2**24}
"""Counters per chunk of the computation, limited by the caches of a CPU and by the memory of other devices."""


class PhiloxDropout(DropoutStreams):
    """Source of one rank's dropout masks, independent of the layout.

    Args:
        micro_batch_size: samples per micro-batch, which tensor shapes are checked against. If samples are split into
            shorter sequences (--seq-length-schedule), tensors contain a multiple of it.
        seed, data, tensor: see ``DropoutStreams``.
        context: context-parallel group, whose ranks hold chunks of the same samples.
    """

    needs_probabilities = True

    def __init__(
        self, micro_batch_size: int, seed: int = 0, data: Group = SINGLE, tensor: Group = SINGLE,
        context: Group = SINGLE,
    ) -> None:  # fmt: skip
        super().__init__(seed, data, tensor)
        self.micro_batch_size, self.context, self.tensor_size = micro_batch_size, context, tensor.size

    def key(self, layer: int, site: str, is_sharded: bool) -> int:
        """Return the hash key, the same on all ranks and for sharded and full tensors."""
        fields = (self.seed, self.position.step, layer, site)
        return hash_key(fields, 8)

    def generator(self, device: torch.device, layer: int, site: str, is_sharded: bool) -> NoReturn:
        """Raise RuntimeError, because numbers drawn from a generator depend on the layout."""
        raise RuntimeError(
            "--layout-independent-dropout does not use random generators, got a call of streams.generator. "
            "Call streams.dropout instead, or remove the flag"
        )

    def dropout(
        self, x: torch.Tensor, probability: float, *, training: bool, layer: int, site: str, is_sharded: bool = False,
        is_sequence_slice: bool = False, residual: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Apply dropout to ``x`` and add ``residual`` if given.

        Shapes:
            x, residual, output [s, b, h], or [s, b, h/t] with ``is_sharded``, or [s/t, b, h] with ``is_sequence_slice``

        Raises:
            ValueError: ``x`` does not have three dimensions, or the second is not a multiple of the micro-batch size.
        """
        if not training or probability == 0.0:
            return add_residual(residual, x)
        if x.dim() != 3 or not x.shape[1] or x.shape[1] % self.micro_batch_size:
            raise ValueError(
                "with --layout-independent-dropout a tensor must have the shape [sequence, micro-batch, hidden], "
                f"got {tuple(x.shape)} at {site!r} with --batch-size {self.micro_batch_size}. "
                "Reshape it, or remove the flag"
            )
        length, samples, width = x.shape
        key, sample = self.key(layer, site, is_sharded), self._first_sample(samples)
        row, column = (
            self.tensor_rank * length if is_sequence_slice else 0,
            self.tensor_rank * width if is_sharded else 0,
        )
        if self.context.size > 1:
            return self._drop_token_ranges(x, residual, probability, key, (row, sample, 0, column), is_sequence_slice)
        if self.uses_kernel(x):
            return fused_dropout.drop(x, residual, Mask(key, probability, (row, sample, 0, column)))
        mask = dropped_mask(
            key,
            probability,
            rows=_range(length, x.device, row).view(-1, 1, 1),
            samples=_range(samples, x.device, sample).view(-1, 1),
            planes=_range(1, x.device),
            columns=_columns(column, width),
        )
        return add_residual(residual, _apply_mask(x, mask, probability))

    def _drop_token_ranges(
        self, x: torch.Tensor, residual: torch.Tensor | None, probability: float, key: int,
        origin: tuple[int, int, int, int], is_sequence_slice: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Apply dropout to ``x`` with context parallelism.

        Each token range is processed separately, because its positions start at another offset.

        Args:
            origin: coordinates of the first element: row among this context rank's s/c rows, sample, plane, column.
            is_sequence_slice: ``x`` is this tensor rank's sequence slice.
        """
        row, sample, plane, column = origin
        rank_ranges = token_ranges(len(x) * (self.tensor_size if is_sequence_slice else 1), self.context)
        clipped_ranges = list(clip_ranges(rank_ranges, row, row + len(x)))
        if self.uses_kernel(x):
            dropped = [
                fused_dropout.drop(
                    x[token_range.start : token_range.stop],
                    None if residual is None else residual[token_range.start : token_range.stop],
                    Mask(key, probability, (token_range.first_position, sample, plane, column)),
                )
                for token_range in clipped_ranges
            ]
            return torch.cat(dropped)
        mask = dropped_mask(
            key,
            probability,
            rows=_token_positions(clipped_ranges, x.device).view(-1, 1, 1),
            samples=_range(x.shape[1], x.device, sample).view(-1, 1),
            planes=_range(1, x.device),
            columns=_columns(column, x.shape[2]),
        )
        return add_residual(residual, _apply_mask(x, mask, probability))

    def attend(
        self, function: Callable[..., torch.Tensor], probability: float, *, device: torch.device, layer: int,
        site: str, is_sharded: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Call the attention ``function`` with dropout of its probabilities."""
        # read key and position now, because the position may change before ``function`` calls ``drop``
        key, position = self.key(layer, site, is_sharded), self.position
        drop = partial(self._drop_probabilities, probability=probability, key=key, at=position, is_cut=is_sharded)
        return function(drop=drop)

    def _drop_probabilities(
        self, x: torch.Tensor, *, probability: float, key: int, at: DropoutKey, is_cut: bool,
        runs: Sequence[TokenRange] = (), head_rank: int = 0, head_ranks: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        """Apply dropout to attention probabilities.

        Shapes:
            x, output [b, a/tn, s, s_k], or [b, a/tn, s/q, s_k] with ``runs``, for n ``head_ranks``

        Args:
            at: forward-pass position.
            runs: query token ranges in the full sequence; empty: the queries start at the first token.
            head_rank, head_ranks: this rank's index and the number of the context ranks that share the heads of a
                tensor rank.
        """
        samples, heads, queries, keys = x.shape
        sample = self._first_sample(samples, at)
        plane = heads * (head_rank + (self.tensor_rank * head_ranks if is_cut else 0))
        if runs and self.uses_kernel(x):
            dropped = []
            for token_range in runs:
                range_mask = Mask(key, probability, (token_range.first_position, sample, plane, 0), is_attention=True)
                dropped.append(fused_dropout.drop(x[:, :, token_range.start : token_range.stop], None, range_mask))
            return torch.cat(dropped, dim=2)
        if self.uses_kernel(x):
            return fused_dropout.drop(x, None, Mask(key, probability, (0, sample, plane, 0), is_attention=True))
        mask = dropped_mask(
            key,
            probability,
            rows=(_token_positions(runs, x.device) if runs else _range(queries, x.device)).view(-1, 1),
            samples=_range(samples, x.device, sample).view(-1, 1, 1, 1),
            planes=_range(heads, x.device, plane).view(-1, 1, 1),
            columns=_columns(0, keys),
        )
        return _apply_mask(x, mask, probability)

    def _first_sample(self, samples: int, at: DropoutKey | None = None) -> int:
        """Return the global-batch index of the first sample in a micro-batch with ``samples`` samples."""
        at = at or self.position
        return (at.first_micro_batch + at.micro_batch) * samples


def dropped_mask(
    key: int, probability: float, *, rows: torch.Tensor, samples: torch.Tensor, planes: torch.Tensor, columns: range
) -> torch.Tensor:
    """Compute the mask of dropped elements: True where the random word is below ``probability * 2**32``.

    Shapes:
        rows, samples, planes: int64 coordinates [..., 1] that broadcast against each other; in ``rows``, all dimensions
            but the first have size 1
        output: bool [..., number of columns]
    """
    threshold = round(probability * 2**32)
    groups = torch.arange(columns.start // LANES, -(-columns.stop // LANES), device=rows.device)
    counters_per_row = groups.numel() * samples.numel() * planes.numel()
    masks = []
    for chunk in rows.split(max(1, CHUNK_COUNTERS.get(rows.device.type, CHUNK_COUNTERS["cuda"]) // counters_per_row)):
        words = philox((groups, chunk, samples, planes), key)
        masks.append(torch.stack([word < threshold for word in words], dim=-1).flatten(-2))  # [..., 4 groups]
    mask = masks[0] if len(masks) == 1 else torch.cat(masks, dim=-rows.dim())
    return mask[..., columns.start % LANES :][..., : len(columns)]


def _apply_mask(x: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    return (x * (1.0 / (1.0 - probability))).masked_fill_(mask, 0.0)


def _token_positions(token_ranges: Iterable[TokenRange], device: torch.device) -> torch.Tensor:
    """Return full-sequence positions for all tokens in ``token_ranges``."""
    return torch.cat(
        [
            _range(token_range.stop - token_range.start, device, token_range.first_position)
            for token_range in token_ranges
        ]
    )


def _columns(start: int, size: int) -> range:
    return range(start, start + size)


def _range(size: int, device: torch.device, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + size, device=device)
