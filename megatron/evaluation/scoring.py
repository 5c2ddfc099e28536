"""Log-likelihoods of tokens by a decoder in any layout: batches by length, shared out to the replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.errors import DataError, NumericsError
from megatron.generate.sampling import vocab_parallel_argmax
from megatron.models.common.generation import DecoderReader, ModelStage, filled_up
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.layers import vocab_range
from megatron.mpu.mappings import gather_from_sequence_region

# A row is read in one pass; attention looks back only, so what fills it up at its end acts on nothing. Logits are made
# of the positions that are scored alone, a chunk at a time. The softmax is in fp64: a sum over many tokens is then the
# same in every layout, but for the rounding of the model itself.

MAX_TOKENS = 16384
"""Of a batch with what fills it up, where no number is given."""
_LOGITS_AT_ONCE = 1 << 24
"""Numbers of a chunk of logits on a rank, which are 8 bytes each while they are scored."""


@dataclass(frozen=True)
class Row:
    """Tokens of which the last ``num_scored`` are predicted, each from all that stand before it.

    Raises:
        ValueError: no token is left to predict the first of them from, or none is scored.
    """

    tokens: tuple[int, ...]
    num_scored: int

    def __post_init__(self) -> None:
        if not 0 < self.num_scored < len(self.tokens):
            raise ValueError(f"of {len(self.tokens)} tokens 1 to {len(self.tokens) - 1} are scored, got {self}")


@dataclass(frozen=True)
class Score:
    """What a model says to a row.

    Args:
        logprob: sum of the natural logarithms of the probabilities of the scored tokens.
        is_greedy: each of them is the likeliest at its place, the lowest id of equals.
    """

    logprob: float
    is_greedy: bool


# From texts to rows.


def row_of(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Row:
    """Return the row that scores ``continuation``: of the context, what fits into ``max_length`` read tokens is left.

    Raises:
        DataError: the continuation alone is longer.
    """
    if len(continuation) > max_length:
        raise DataError(
            f"a continuation must have at most {max_length} tokens, which the model reads at once, got "
            f"{len(continuation)}. Leave the example out, or raise --max-length"
        )
    return Row((*context, *continuation)[-(max_length + 1) :], len(continuation))


def rolling_rows(tokens: Sequence[int], prefix: int, max_length: int) -> list[Row]:
    """Return the rows that score each of ``tokens`` once, the first from ``prefix``.

    The first row reads ``prefix`` and what follows; each further one as many tokens as it may, and scores those that no
    row has scored, so that also the last has all the context that fits.
    """
    rows = []
    for first in range(0, len(tokens), max_length):
        stop = min(first + max_length, len(tokens))
        read = (prefix, *tokens[:stop]) if first == 0 else tokens[stop - max_length - 1 : stop]
        rows.append(Row(tuple(read), stop - first))
    return rows


OnRows = Callable[[int], None]
"""Called with the number of rows that this replica has just scored."""


def longest_row(part: ModelStage, wanted: int) -> int:
    """Return how many tokens a pass may read: ``wanted``, or fewer where learned positions end or are cut."""
    sizes, place = part.sizes, part.place
    length = min(wanted, sizes.max_position_embeddings) if sizes.has_position_ids else wanted
    return length // place.group.size * place.group.size if place.sequence_parallel else length


def score_rows(
    part: ModelStage,
    rows: Sequence[Row],
    *,
    data: Group = SINGLE,
    max_tokens: int = MAX_TOKENS,
    on_rows: OnRows | None = None,
) -> list[Score]:
    """Return the score of each row, in their order, on every rank. Collective over all ranks.

    Args:
        rows: the same on every rank.
        data: the replicas, which share the batches.
        max_tokens: of a batch, with what fills it up; a longer row is a batch of its own.

    Raises:
        DataError: a token outside the vocabulary.
        NumericsError: logits that are no numbers; on every rank of the replica.
    """
    _check(part, rows)
    found: dict[int, Score] = {}
    with part.evaluating():
        for number, batch in enumerate(batches_by_length([len(row.tokens) - 1 for row in rows], max_tokens)):
            if number % data.size != data.rank:
                continue
            own = [rows[place] for place in batch]
            found.update(zip(batch, _scores(part, own), strict=True))
            if on_rows is not None:
                on_rows(len(own))
    every = {place: score for one in data.gather_objects(found) for place, score in one.items()}
    return [every[place] for place in range(len(rows))]


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the places of rows that are read together: the longest first, so that one too large fails at once."""
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    batch: list[int] = []
    for place in order:
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _check(part: ModelStage, rows: Sequence[Row]) -> None:
    size = part.sizes.vocab_size
    for row in rows:
        wrong = next((token for token in row.tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise DataError(
                f"tokens must be from 0 to {size - 1}, got {wrong}. Were they made with another tokenizer than the "
                "model's?"
            )


def _scores(part: ModelStage, rows: Sequence[Row]) -> list[Score]:
    """Return the scores of a batch. Collective over the replica."""
    inputs: dict[tuple[int, ...], int] = {}  # choices of one token share what they are read with
    places = [inputs.setdefault(row.tokens[:-1], len(inputs)) for row in rows]
    tokens = _filled_up(part, list(inputs))
    reader = DecoderReader(part, tokens.shape[1])
    x = reader.hidden(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape))  # [s, b, h]
    picked, of_batch, targets = list[int](), list[int](), list[int]()
    for row, place in zip(rows, places, strict=True):
        stop = len(row.tokens) - 1
        picked += range(stop - row.num_scored, stop)
        of_batch += [place] * row.num_scored
        targets += row.tokens[-row.num_scored :]
    if x is not None and part.place.sequence_parallel:
        x = gather_from_sequence_region(x, part.place.group)
    logprobs, best = list[float](), list[int]()
    chunk = _chunk_of(part)
    for first in range(0, len(picked), chunk):
        taken = slice(first, first + chunk)
        values = _of_positions(part, reader, x, picked[taken], of_batch[taken], targets[taken])
        logprobs += values[0].tolist()
        best += values[1].long().tolist()
    if any(map(math.isnan, logprobs)):
        raise NumericsError("logits must be numbers, got NaN. Are the weights finite? Load another checkpoint.")
    scores, at = [], 0
    for row in rows:
        own = slice(at, at + row.num_scored)
        scores.append(Score(math.fsum(logprobs[own]), best[own] == targets[own]))
        at += row.num_scored
    return scores


def _filled_up(part: ModelStage, inputs: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Return the rows [b, s] with token 0 behind their ends, s a multiple of the parts that it is cut into."""
    tokens, _ = filled_up(inputs)
    behind = -tokens.shape[1] % part.place.group.size if part.place.sequence_parallel else 0
    return torch.nn.functional.pad(tokens, (0, behind))


def _chunk_of(part: ModelStage) -> int:
    """Return how many positions have their logits made at once; a multiple of the tensor ranks."""
    rows, _, _ = vocab_range(part.sizes.vocab_size, part.place.group, part.sizes.make_vocab_size_divisible_by)
    ranks = part.place.group.size
    return max(1, _LOGITS_AT_ONCE // rows // ranks) * ranks


def _of_positions(
    part: ModelStage, reader: DecoderReader, x: torch.Tensor | None, picked: list[int], of_batch: list[int],
    targets: list[int],
) -> torch.Tensor:  # fmt: skip
    """Return log-probabilities of ``targets`` and the likeliest tokens on every stage. Collective over the replica.

    Shapes:
        x      [s, b, h] on the stage of the last layer, None elsewhere
        output fp64 [2, n]
    """
    place, number = part.place, len(picked)
    behind = -number % place.group.size if place.sequence_parallel else 0
    if x is not None:
        rows, columns = (torch.tensor([*each, *[0] * behind], device=x.device) for each in (picked, of_batch))
        x = x[rows, columns]  # [n, h]
        x = place.part(x)
    logits = reader.logits(x, number + behind)  # [n, v/t]
    found = torch.empty(2, number, dtype=torch.float64, device=part.device)
    if logits is not None:
        wide, sizes = logits[:number].double(), part.sizes
        wanted = torch.tensor(targets, device=wide.device)
        words = {"vocab_size": sizes.vocab_size, "divisible_by": sizes.make_vocab_size_divisible_by}
        loss = vocab_parallel_cross_entropy(wide.unsqueeze(1), wanted.unsqueeze(1), **words, group=place.group)
        found[0] = -loss[:, 0]
        found[1] = vocab_parallel_argmax(wide, **words, group=place.group)
    if part.pipe.size > 1:
        dist.broadcast(found, part.pipe.ranks[part.stages[-1]], group=part.pipe.handle)
    return found.cpu()
