"""Dropout from keyed generators or Philox counters (--layout-independent-dropout); mpu.checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron.device import default_generator
from megatron.mpu import fused_dropout
from megatron.mpu.activation_storage import ActivationStorage
from megatron.mpu.context_parallel import Run, runs_of, runs_within
from megatron.mpu.fused_dropout import Mask
from megatron.mpu.groups import SINGLE, Group

# Dropout from keyed generators: nothing to save, nothing to restore, the same in the recomputed forward.
#
# A mask is a function of (seed, step, micro-batch, data rank, layer, site) and, where the tensor is cut over the
# tensor-parallel group, of the tensor rank. So it is equal on all ranks that hold the same activation, different
# everywhere else, and a resumed or recomputed step draws the very same masks. ``PhiloxDropout`` has masks that
# do not depend on the layout either. On CUDA a kernel takes the same key in place of a generator: no mask is in memory,
# and it depends on no number of multiprocessors.


def hashed(place: tuple[Any, ...], num_bytes: int) -> int:
    """Return the key that belongs to ``place``: of a generator, or of Philox."""
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=num_bytes).digest(), "little")


@dataclass(frozen=True)
class DropoutKey:
    """Which forward pass this is: the optimizer step and the micro-batch within it, both from 0.

    ``first`` is how many micro-batches of the step earlier replicas take; streams that know no samples do not look at
    it.
    """

    step: int = 0
    micro_batch: int = 0
    first: int = 0


class DropoutStreams:
    """The source of all dropout masks of one rank.

    Args:
        seed: the run's seed, the same on every rank.
        data: the data-parallel group: its ranks draw different masks.
        tensor: the tensor-parallel group: its ranks draw different masks for tensors that are cut.

    Attributes:
        has_kernels: on CUDA masks are made by Triton's kernels, where it is installed.
    """

    def __init__(self, seed: int = 0, data: Group = SINGLE, tensor: Group = SINGLE) -> None:
        self.seed = seed
        self.data_rank = data.rank
        self.tensor_rank = tensor.rank
        self.has_kernels = True
        self._counts: torch.Tensor | None = None  # of the position, for compiled layers
        self.position = DropoutKey()

    @property
    def position(self) -> DropoutKey:
        """Which forward pass runs now."""
        return self._position

    @position.setter
    def position(self, position: DropoutKey) -> None:
        self._position = position
        if self._counts is not None:  # a new tensor, for graphs keep the one that they were given
            self._counts = torch.tensor([position.step, position.micro_batch])

    def enter_graphs(self) -> None:
        """Let compiled layers drop elements in the midst of their graphs."""
        self._counts = torch.tensor([self.position.step, self.position.micro_batch])

    @contextmanager
    def at(self, position: DropoutKey) -> Iterator[None]:
        """Draw masks as of ``position`` inside the ``with`` block: what a recomputed forward needs."""
        kept, self.position = self.position, position
        try:
            yield
        finally:
            self.position = kept

    def key(self, layer: int, site: str, is_cut: bool) -> int:
        """Return the generator seed for one mask; ``layer`` may be a tensor of one number."""
        tensor_rank = self.tensor_rank if is_cut else -1
        at = self.position
        return hashed((self.seed, at.step, at.micro_batch, self.data_rank, tensor_rank, int(layer), site), 7)

    def by_kernel(self, x: torch.Tensor) -> bool:
        """Return whether the kernel drops elements of ``x``: of fp64 it would lose bits."""
        is_on_cuda = self.has_kernels and x.device.type == "cuda"
        return is_on_cuda and x.dtype != torch.float64 and fused_dropout.is_there()

    @contextmanager
    def generator(self, device: torch.device, layer: int, site: str, is_cut: bool) -> Iterator[None]:
        """Seed torch's default generator of ``device`` inside the ``with`` block and put its state back after."""
        generator = default_generator(device)
        state = generator.get_state()
        generator.manual_seed(self.key(layer, site, is_cut))
        try:
            yield
        finally:
            generator.set_state(state)

    def dropout(
        self, x: torch.Tensor, probability: float, *, training: bool, layer: int, site: str, is_cut: bool = False,
        is_part: bool = False, residual: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``x`` with elements dropped by the mask that belongs to this place, added to ``residual`` if any.

        Args:
            is_cut: ``x`` is this tensor rank's slice rather than a copy that all ranks hold.
            is_part: ``x`` is this tensor rank's part of the sequence.
        """
        if not training or probability == 0.0:
            return _plus(residual, x)
        if self._counts is not None and torch.compiler.is_compiling():
            return _plus(residual, self._drop_in_graph(x, probability, layer, site, is_cut or is_part))
        return self.drop(x, probability, layer, site, is_cut or is_part, residual)

    def drop(
        self, x: torch.Tensor, probability: float, layer: int, site: str, is_cut: bool,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return what ``dropout`` does in training."""
        if self.by_kernel(x):
            return fused_dropout.drop(x, residual, Mask(self.key(layer, site, is_cut), probability))
        with self.generator(x.device, layer, site, is_cut):
            dropped = F.dropout(x, probability, training=True)
        return _plus(residual, dropped)

    def _drop_in_graph(self, x: torch.Tensor, probability: float, layer: Any, site: str, is_cut: bool) -> torch.Tensor:
        """Return what ``drop`` does, by an operator; ``layer`` is a tensor."""
        ranks = [self.seed, self.data_rank, self.tensor_rank if is_cut else -1]
        by_kernel = self.by_kernel(x)
        dropped, _ = fused_dropout.keyed_dropout(x, self._counts, layer, ranks, site, probability, by_kernel)
        return dropped

    def recomputed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(*args)`` without keeping what it needs for its backward; see ``checkpoint``."""
        return checkpoint(self, function, *args)

    def attend(
        self, function: Callable[..., torch.Tensor], probability: float, *, device: torch.device, layer: int,
        site: str, is_cut: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Return what ``function`` of ``megatron.ops`` gives when it drops probabilities by the mask of this place.

        Args:
            function: takes ``dropout``, a rate at which it draws from torch's default generator itself, or ``drop``.
            is_cut: the heads are this tensor rank's.
        """
        with self.generator(device, layer, site, is_cut):
            return function(dropout=probability)


def checkpoint(
    streams: DropoutStreams, function: Callable[..., Any], *args: Any, keeper: ActivationStorage | None = None
) -> Any:
    """Run ``function(*args)`` without keeping its activations; backward runs it again with the same dropout masks.

    Args:
        keeper: puts ``args`` away until then; None: they wait as they are.

    Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".
    """
    position = streams.position  # of now: when backward recomputes, another micro-batch may be running
    inputs = None if keeper is None else keeper.put_away(args)

    def run(*given: Any) -> Any:
        with streams.at(position):
            return function(*(given if inputs is None else inputs.take()))

    held = args if inputs is None else ()
    return torch_checkpoint(run, *held, use_reentrant=False, preserve_rng_state=False)


# Philox-4x32-10: random words from a counter and a key, without a state, on torch's integer tensors.
#
# Ten rounds turn four 32-bit counter words and two key words into four random words. Words live in int64 tensors, so
# that a product of two has room; the bits are the same on every device.
#
# Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.3.

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: int) -> Words:
    """Return four random words for each counter.

    The words of the counter may have different shapes: they are broadcast against each other as late as the rounds
    allow, so that a counter made of coordinates costs less than one that is written out.

    Shapes:
        counter 4 x int64 tensors of words, 0 to 2**32 - 1, that broadcast to [...]
        output  4 x int64 [...]

    Args:
        key: 64 bits, the first word in the low half.
    """
    a, b, c, d = counter
    first, second = key & WORD, key >> 32
    for _ in range(ROUNDS):
        even, odd = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # modulo 2**64, whose upper half is right even when negative
        a, b, c, d = _mixed(odd, b, first), odd, _mixed(even, d, second), even
        first, second = (first + KEY_STEPS[0]) & WORD, (second + KEY_STEPS[1]) & WORD
    return a, b & WORD, c, d & WORD


def _mixed(product: torch.Tensor, word: torch.Tensor, key: int) -> torch.Tensor:
    """Return the upper half of ``product``, mixed with key and ``word``, of which only the lower half counts."""
    mixed = (product >> 32) ^ word
    mixed ^= key
    mixed &= WORD
    return mixed


# Dropout whose masks are the same in every layout: each element's fate is a hash of what it is, not of who holds it.
#
# The key of the hash is made of seed, step, layer and site; its counter says which element of the whole tensor of the
# global batch this is, and four neighbouring columns share one counter:
#
# | word | hidden states [s, b, h] | attention probabilities [b, a, s, s_k] |
# |---|---|---|
# | 0 | column // 4 | key // 4 |
# | 1 | position | query |
# | 2 | sample in the global batch | the same |
# | 3 | 0 | head |
#
# Which rank, stage, replica or micro-batch works on it is nowhere in there. Samples are dealt as
# ``megatron.data.batches`` says: sample j of micro-batch i on replica r is number (r m + i) b + j of the global batch,
# with m micro-batches of b samples on each replica. Where samples are cut into pieces (--seq-length-schedule), b is
# their number in a micro-batch, and j counts them.

LANES = 4
"""Columns that share a counter."""
BLOCK = {"cpu": 2**14, "cuda": 2**24}
"""Counters that are worked on at a time: on a CPU as many as its caches hold, elsewhere few enough for its memory."""


class PhiloxDropout(DropoutStreams):
    """The source of all dropout masks of one rank, in any layout.

    Args:
        micro_batch_size: samples in each forward, to see that the tensors are what they must be; where samples are cut
            into pieces (--seq-length-schedule), each counts as a sample, in all layouts alike.
        seed, data, tensor: as of ``DropoutStreams``.
        context: the context-parallel group, whose ranks have pieces of the same samples.
    """

    def __init__(
        self, micro_batch_size: int, seed: int = 0, data: Group = SINGLE, tensor: Group = SINGLE,
        context: Group = SINGLE,
    ) -> None:  # fmt: skip
        super().__init__(seed, data, tensor)
        self.micro_batch_size, self.context, self.tensor_size = micro_batch_size, context, tensor.size

    def key(self, layer: int, site: str, is_cut: bool) -> int:
        """Return the key of the hash, the same on all ranks; cut or not is the same mask."""
        place = (self.seed, self.position.step, layer, site)
        return hashed(place, 8)

    def generator(self, device: torch.device, layer: int, site: str, is_cut: bool) -> NoReturn:
        """Raise RuntimeError: what a generator draws depends on the layout."""
        raise RuntimeError(
            "with --layout-independent-dropout there is no generator to draw from, got a call of streams.generator. "
            "Use streams.dropout, or leave the flag out"
        )

    def dropout(
        self, x: torch.Tensor, probability: float, *, training: bool, layer: int, site: str, is_cut: bool = False,
        is_part: bool = False, residual: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``x`` with elements dropped by the mask that belongs to them, added to ``residual`` if any.

        Shapes:
            x, residual, output [s, b, h], or [s, b, h/t] where ``is_cut``, or [s/t, b, h] where ``is_part``

        Raises:
            ValueError: ``x`` has other dimensions than these.
        """
        if not training or probability == 0.0:
            return _plus(residual, x)
        if x.dim() != 3 or not x.shape[1] or x.shape[1] % self.micro_batch_size:
            raise ValueError(
                "with --layout-independent-dropout a tensor must be [sequence, micro-batch, hidden], so that its "
                f"samples are known, got {tuple(x.shape)} at {site!r} with --batch-size {self.micro_batch_size}. "
                "Bring it into that shape, or leave the flag out"
            )
        length, samples, width = x.shape
        key, sample = self.key(layer, site, is_cut), self._first_sample(samples)
        row, column = self.tensor_rank * length if is_part else 0, self.tensor_rank * width if is_cut else 0
        if self.context.size > 1:
            return self._drop_runs(x, residual, probability, key, (row, sample, 0, column), is_part)
        if self.by_kernel(x):
            return fused_dropout.drop(x, residual, Mask(key, probability, (row, sample, 0, column)))
        mask = dropped_mask(
            key,
            probability,
            rows=_range(length, x.device, row).view(-1, 1, 1),
            samples=_range(samples, x.device, sample).view(-1, 1),
            planes=_range(1, x.device),
            columns=_columns(column, width),
        )
        return _plus(residual, _without(x, mask, probability))

    def _drop_runs(
        self, x: torch.Tensor, residual: torch.Tensor | None, probability: float, key: int,
        first: tuple[int, int, int, int], is_part: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``x`` [s/c, b, h], or a part of it that begins at ``first``, each run of it dropped at its place."""
        row, sample, plane, column = first
        own = runs_of(len(x) * (self.tensor_size if is_part else 1), self.context)
        runs = list(runs_within(own, row, row + len(x)))
        if self.by_kernel(x):
            parts = [
                fused_dropout.drop(
                    x[run.start : run.stop],
                    None if residual is None else residual[run.start : run.stop],
                    Mask(key, probability, (run.first, sample, plane, column)),
                )
                for run in runs
            ]
            return torch.cat(parts)
        mask = dropped_mask(
            key,
            probability,
            rows=_rows(runs, x.device).view(-1, 1, 1),
            samples=_range(x.shape[1], x.device, sample).view(-1, 1),
            planes=_range(1, x.device),
            columns=_columns(column, x.shape[2]),
        )
        return _plus(residual, _without(x, mask, probability))

    def attend(
        self, function: Callable[..., torch.Tensor], probability: float, *, device: torch.device, layer: int,
        site: str, is_cut: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Return what ``function`` gives with the probabilities dropped that belong to this place."""
        key, at = self.key(layer, site, is_cut), self.position  # now: the position may move on
        drop = partial(self._drop_probabilities, probability=probability, key=key, at=at, is_cut=is_cut)
        return function(drop=drop)

    def _drop_probabilities(
        self, x: torch.Tensor, *, probability: float, key: int, at: DropoutKey, is_cut: bool,
        runs: Sequence[Run] = (), first_head: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``x`` with elements dropped.

        Shapes:
            x, output [b, a/t, s, s_k], or [b, a/tc, s, s_k] with ``first_head``, or with ``runs`` [b, a/t, s/c, s_k]

        Args:
            at: where the training is.
            runs: where its queries are in the whole sequence; none: at its start.
            first_head: of this tensor rank's.
        """
        samples, heads, queries, keys = x.shape
        sample = self._first_sample(samples, at)
        own_heads = heads * self.context.size if self.context.size > 1 and not runs else heads
        plane = first_head + (self.tensor_rank * own_heads if is_cut else 0)
        if runs and self.by_kernel(x):
            parts = []
            for run in runs:
                mask_at = Mask(key, probability, (run.first, sample, plane, 0), is_attention=True)
                parts.append(fused_dropout.drop(x[:, :, run.start : run.stop], None, mask_at))
            return torch.cat(parts, dim=2)
        if self.by_kernel(x):
            return fused_dropout.drop(x, None, Mask(key, probability, (0, sample, plane, 0), is_attention=True))
        mask = dropped_mask(
            key,
            probability,
            rows=(_rows(runs, x.device) if runs else _range(queries, x.device)).view(-1, 1),
            samples=_range(samples, x.device, sample).view(-1, 1, 1, 1),
            planes=_range(heads, x.device, plane).view(-1, 1, 1),
            columns=_columns(0, keys),
        )
        return _without(x, mask, probability)

    def _first_sample(self, samples: int, at: DropoutKey | None = None) -> int:
        """Return the number within the global batch of the first of ``samples``, pieces included, of a micro-batch."""
        at = at or self.position
        return (at.first + at.micro_batch) * samples


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


def _plus(residual: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x if residual is None else residual + x


def _without(x: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    return (x * (1.0 / (1.0 - probability))).masked_fill_(mask, 0.0)


def _rows(runs: Iterable[Run], device: torch.device) -> torch.Tensor:
    """Return where in the whole sequence the tokens of ``runs`` are."""
    return torch.cat([_range(run.stop - run.start, device, run.first) for run in runs])


def _columns(start: int, size: int) -> range:
    return range(start, start + size)


def _range(size: int, device: torch.device, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + size, device=device)
