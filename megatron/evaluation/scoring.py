"""Log-likelihoods of tokens by a decoder in any layout, in batches by length that are distributed over the replicas."""

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

# Each row is processed in one pass. Rows are padded at the end, which has no effect because attention is causal. Logits
# are computed only for scored positions, in chunks. The softmax is in fp64, so that a sum over many tokens is the same
# in every layout, except for rounding within the model.

MAX_TOKENS = 16384
"""Default maximum number of tokens in a batch, including padding."""
_LOGITS_AT_ONCE = 1 << 24
"""Number of logits per chunk on a rank. During scoring, each logit takes 8 bytes."""


@dataclass(frozen=True)
class Row:
    """Tokens whose last ``num_scored`` are predicted, each from all previous tokens.

    Raises:
        ValueError: no token is scored, or there is no token before the first scored one.
    """

    tokens: tuple[int, ...]
    num_scored: int

    def __post_init__(self) -> None:
        if not 0 < self.num_scored < len(self.tokens):
            raise ValueError(
                f"a row of {len(self.tokens)} tokens must have 1 to {len(self.tokens) - 1} scored tokens, got {self}"
            )


@dataclass(frozen=True)
class Score:
    """Score of a row.

    Args:
        logprob: sum of the natural log-probabilities of the scored tokens.
        is_greedy: each scored token is the most likely one at its position (the lowest id of a tie).
    """

    logprob: float
    is_greedy: bool


# Rows.


def row_of(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Row:
    """Return the row that scores ``continuation`` after ``context``.

    A row has at most ``max_length`` input tokens. A longer context is truncated at its start.

    Raises:
        DataError: the continuation has more than ``max_length`` tokens.
    """
    if len(continuation) > max_length:
        raise DataError(
            f"a continuation must have at most {max_length} tokens, the model's maximum length, got "
            f"{len(continuation)}. Leave the example out, or raise --max-length"
        )
    return Row((*context, *continuation)[-(max_length + 1) :], len(continuation))


def rolling_rows(tokens: Sequence[int], prefix: int, max_length: int) -> list[Row]:
    """Return rows that together score each of ``tokens`` once.

    The first row starts with ``prefix``. Each further row has as many input tokens as possible and scores the tokens
    that have not been scored, so that the last row, too, has the maximum context.
    """
    rows = []
    for first in range(0, len(tokens), max_length):
        stop = min(first + max_length, len(tokens))
        window = (prefix, *tokens[:stop]) if first == 0 else tokens[stop - max_length - 1 : stop]
        rows.append(Row(tuple(window), stop - first))
    return rows


OnRows = Callable[[int], None]
"""Called with the number of rows that this replica has just scored."""


def longest_row(part: ModelStage, wanted: int) -> int:
    """Return the maximum number of input tokens per row.

    This is ``wanted``, limited by the learned positions and rounded down to a multiple of the sequence shards.
    """
    sizes, parallel = part.sizes, part.place
    length = min(wanted, sizes.max_position_embeddings) if sizes.has_position_ids else wanted
    return length // parallel.group.size * parallel.group.size if parallel.sequence_parallel else length


def score_rows(
    part: ModelStage,
    rows: Sequence[Row],
    *,
    data: Group = SINGLE,
    max_tokens: int = MAX_TOKENS,
    on_rows: OnRows | None = None,
) -> list[Score]:
    """Return the scores of ``rows`` in order, on every rank. Collective over all ranks.

    Args:
        rows: the same on every rank.
        data: the replicas, among which batches are distributed.
        max_tokens: maximum per batch, including padding; a longer row is a separate batch.

    Raises:
        DataError: a token is outside the vocabulary.
        NumericsError: logits are NaN; raised on every rank of the replica.
    """
    _check(part, rows)
    scores_by_idx: dict[int, Score] = {}
    with part.evaluating():
        for batch_idx, batch in enumerate(batches_by_length([len(row.tokens) - 1 for row in rows], max_tokens)):
            if batch_idx % data.size != data.rank:
                continue
            batch_rows = [rows[idx] for idx in batch]
            scores_by_idx.update(zip(batch, _scores(part, batch_rows), strict=True))
            if on_rows is not None:
                on_rows(len(batch_rows))
    all_scores = {
        idx: score for scores_of_rank in data.gather_objects(scores_by_idx) for idx, score in scores_of_rank.items()
    }
    return [all_scores[idx] for idx in range(len(rows))]


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of rows in each batch, longest rows first, so that a batch that is too large fails early."""
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
        invalid = next((token for token in row.tokens if not 0 <= token < size), None)
        if invalid is not None:
            raise DataError(
                f"tokens must be from 0 to {size - 1}, got {invalid}. Were they encoded with another tokenizer than "
                "the model's?"
            )


def _scores(part: ModelStage, rows: Sequence[Row]) -> list[Score]:
    """Return the scores of a batch. Collective over the replica."""
    inputs: dict[tuple[int, ...], int] = {}  # one-token choices of a question have equal inputs
    columns = [inputs.setdefault(row.tokens[:-1], len(inputs)) for row in rows]
    tokens = _filled_up(part, list(inputs))
    reader = DecoderReader(part, tokens.shape[1])
    x = reader.hidden(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape))  # [s, b, h]
    positions, batch_columns, targets = list[int](), list[int](), list[int]()
    for row, column in zip(rows, columns, strict=True):
        stop = len(row.tokens) - 1
        positions += range(stop - row.num_scored, stop)
        batch_columns += [column] * row.num_scored
        targets += row.tokens[-row.num_scored :]
    if x is not None and part.place.sequence_parallel:
        x = gather_from_sequence_region(x, part.place.group)
    logprobs, best = list[float](), list[int]()
    chunk = _chunk_of(part)
    for first in range(0, len(positions), chunk):
        chunk_slice = slice(first, first + chunk)
        values = _of_positions(
            part, reader, x, positions[chunk_slice], batch_columns[chunk_slice], targets[chunk_slice]
        )
        logprobs += values[0].tolist()
        best += values[1].long().tolist()
    if any(map(math.isnan, logprobs)):
        raise NumericsError(
            "logits must be finite, got NaN. Check that the weights are finite, or load another checkpoint."
        )
    scores, offset = [], 0
    for row in rows:
        row_slice = slice(offset, offset + row.num_scored)
        scores.append(Score(math.fsum(logprobs[row_slice]), best[row_slice] == targets[row_slice]))
        offset += row.num_scored
    return scores


def _filled_up(part: ModelStage, inputs: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Return the rows [b, s] padded at the end with token 0, s a multiple of the number of sequence shards."""
    tokens, _ = filled_up(inputs)
    padding = -tokens.shape[1] % part.place.group.size if part.place.sequence_parallel else 0
    return torch.nn.functional.pad(tokens, (0, padding))


def _chunk_of(part: ModelStage) -> int:
    """Return the number of positions per chunk of logits, a multiple of the number of tensor ranks."""
    rows, _, _ = vocab_range(part.sizes.vocab_size, part.place.group, part.sizes.make_vocab_size_divisible_by)
    ranks = part.place.group.size
    return max(1, _LOGITS_AT_ONCE // rows // ranks) * ranks


def _of_positions(
    part: ModelStage, reader: DecoderReader, x: torch.Tensor | None, picked: list[int], of_batch: list[int],
    targets: list[int],
) -> torch.Tensor:  # fmt: skip
    """Return the log-probabilities of ``targets`` and the most likely tokens, on every stage.

    Collective over the replica.

    Args:
        picked: sequence index of each of the n positions.
        of_batch: batch index of each of the n positions.

    Shapes:
        x      [s, b, h] on the stage of the last layer, None elsewhere
        output fp64 [2, n]: log-probabilities, token ids
    """
    parallel, num_positions = part.place, len(picked)
    padding = -num_positions % parallel.group.size if parallel.sequence_parallel else 0
    if x is not None:
        rows, columns = (torch.tensor([*indices, *[0] * padding], device=x.device) for indices in (picked, of_batch))
        x = x[rows, columns]  # [n, h]
        x = parallel.part(x)
    logits = reader.logits(x, num_positions + padding)  # [n, v/t]
    result = torch.empty(2, num_positions, dtype=torch.float64, device=part.device)
    if logits is not None:
        logits_fp64, sizes = logits[:num_positions].double(), part.sizes
        target_ids = torch.tensor(targets, device=logits_fp64.device)
        vocabulary = {"vocab_size": sizes.vocab_size, "divisible_by": sizes.make_vocab_size_divisible_by}
        loss = vocab_parallel_cross_entropy(
            logits_fp64.unsqueeze(1), target_ids.unsqueeze(1), **vocabulary, group=parallel.group
        )
        result[0] = -loss[:, 0]
        result[1] = vocab_parallel_argmax(logits_fp64, **vocabulary, group=parallel.group)
    if part.pipe.size > 1:
        dist.broadcast(result, part.pipe.ranks[part.stages[-1]], group=part.pipe.handle)
    return result.cpu()
