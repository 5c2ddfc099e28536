"""Token log-likelihoods by a decoder in any layout, in batches by length that are distributed over the replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.errors import DataError, NumericsError
from megatron.generate.sampling import vocab_parallel_argmax
from megatron.models.common.generation import CachedDecoder, ModelStage, pad_rows
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.layers import vocab_range
from megatron.mpu.mappings import gather_from_sequence_region

# Each row is processed in one pass. Rows are padded at the end, which has no effect because attention is causal. Logits
# are computed only for scored positions, in chunks. The softmax is in fp64, so that a sum over many tokens is the same
# in every layout, except for rounding within the model.

MAX_TOKENS = 16384
"""Default maximum number of tokens in a batch, including padding."""
_LOGITS_PER_CHUNK = 1 << 24
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
    """A row's score.

    Args:
        logprob: natural log-probability, summed over the scored tokens.
        is_greedy: each scored token is the most likely token at its position (the lowest id of a tie).
    """

    logprob: float
    is_greedy: bool


# Rows.


def make_row(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Row:
    """Build the row that scores ``continuation`` after ``context``.

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
    """Build rows that together score each of ``tokens`` once.

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


def max_row_length(stage: ModelStage, max_length: int) -> int:
    """Compute the maximum input tokens per row.

    This is ``max_length``, limited by the learned positions and rounded down to a multiple of the sequence shards.
    """
    args, parallel = stage.args, stage.parallel
    length = min(max_length, args.max_position_embeddings) if args.has_position_ids else max_length
    return length // parallel.group.size * parallel.group.size if parallel.sequence_parallel else length


def score_rows(
    stage: ModelStage,
    rows: Sequence[Row],
    *,
    data: Group = SINGLE,
    max_tokens: int = MAX_TOKENS,
    on_rows: OnRows | None = None,
) -> list[Score]:
    """Score ``rows``, with results in order on every rank. Collective over all ranks.

    Args:
        rows: the same on every rank.
        data: the replicas, among which batches are distributed.
        max_tokens: maximum per batch, including padding; a longer row is a separate batch.

    Raises:
        DataError: a token is outside the vocabulary.
        NumericsError: logits are NaN; raised on every rank of the replica.
    """
    _check_tokens(stage, rows)
    scores_by_idx: dict[int, Score] = {}
    with stage.evaluation_mode():
        for batch_idx, batch in enumerate(batches_by_length([len(row.tokens) - 1 for row in rows], max_tokens)):
            if batch_idx % data.size != data.rank:
                continue
            batch_rows = [rows[idx] for idx in batch]
            scores_by_idx.update(zip(batch, _score_batch(stage, batch_rows), strict=True))
            if on_rows is not None:
                on_rows(len(batch_rows))
    all_scores = {
        idx: score for scores_of_rank in data.gather_objects(scores_by_idx) for idx, score in scores_of_rank.items()
    }
    return [all_scores[idx] for idx in range(len(rows))]


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield row indices for each batch, longest rows first, so that a batch that is too large fails early."""
    order = sorted(range(len(lengths)), key=lambda idx: (-lengths[idx], idx))
    batch: list[int] = []
    for idx in order:
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(idx)
    if batch:
        yield batch


def _check_tokens(stage: ModelStage, rows: Sequence[Row]) -> None:
    vocab_size = stage.args.vocab_size
    for row in rows:
        invalid = next((token for token in row.tokens if not 0 <= token < vocab_size), None)
        if invalid is not None:
            raise DataError(
                f"tokens must be from 0 to {vocab_size - 1}, got {invalid}. Were they encoded with another tokenizer "
                "than the model's?"
            )


def _score_batch(stage: ModelStage, rows: Sequence[Row]) -> list[Score]:
    """Score a batch. Collective over the replica."""
    inputs: dict[tuple[int, ...], int] = {}  # one-token choices of a question have equal inputs
    columns = [inputs.setdefault(row.tokens[:-1], len(inputs)) for row in rows]
    tokens = _pad_rows(stage, list(inputs))
    reader = CachedDecoder(stage, tokens.shape[1])
    x = reader.hidden_states(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape))  # [s, b, h]
    positions, batch_columns, targets = list[int](), list[int](), list[int]()
    for row, column in zip(rows, columns, strict=True):
        stop = len(row.tokens) - 1
        positions += range(stop - row.num_scored, stop)
        batch_columns += [column] * row.num_scored
        targets += row.tokens[-row.num_scored :]
    if x is not None and stage.parallel.sequence_parallel:
        x = gather_from_sequence_region(x, stage.parallel.group)
    logprobs, best = list[float](), list[int]()
    chunk_size = _chunk_size(stage)
    for first in range(0, len(positions), chunk_size):
        chunk_slice = slice(first, first + chunk_size)
        values = _score_positions(
            stage, reader, x, positions[chunk_slice], batch_columns[chunk_slice], targets[chunk_slice]
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


def _pad_rows(stage: ModelStage, inputs: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Pad rows [b, s] at the end with token 0 until s is a multiple of the sequence shard count."""
    tokens, _ = pad_rows(inputs)
    padding = -tokens.shape[1] % stage.parallel.group.size if stage.parallel.sequence_parallel else 0
    return torch.nn.functional.pad(tokens, (0, padding))


def _chunk_size(stage: ModelStage) -> int:
    """Choose the number of positions per logit chunk, a multiple of the tensor size."""
    num_rows, _, _ = vocab_range(stage.args.vocab_size, stage.parallel.group, stage.args.make_vocab_size_divisible_by)
    num_ranks = stage.parallel.group.size
    return max(1, _LOGITS_PER_CHUNK // num_rows // num_ranks) * num_ranks


def _score_positions(
    stage: ModelStage, reader: CachedDecoder, x: torch.Tensor | None, positions: list[int], batch_columns: list[int],
    targets: list[int],
) -> torch.Tensor:  # fmt: skip
    """Compute each target's log-probability and each position's most likely token, on every stage.

    Collective over the replica.

    Args:
        positions: sequence index of each of the n positions.
        batch_columns: batch index of each of the n positions.

    Shapes:
        x      [s, b, h] on the stage of the last layer, None elsewhere
        output fp64 [2, n]: log-probabilities, token ids
    """
    parallel, num_positions = stage.parallel, len(positions)
    padding = -num_positions % parallel.group.size if parallel.sequence_parallel else 0
    if x is not None:
        rows, columns = (
            torch.tensor([*indices, *[0] * padding], device=x.device) for indices in (positions, batch_columns)
        )
        x = x[rows, columns]  # [n, h]
        x = parallel.shard_sequence(x)
    logits = reader.logits(x, num_positions + padding)  # [n, v/t]
    result = torch.empty(2, num_positions, dtype=torch.float64, device=stage.device)
    if logits is not None:
        logits_fp64, args = logits[:num_positions].double(), stage.args
        target_ids = torch.tensor(targets, device=logits_fp64.device)
        vocabulary: dict[str, Any] = {"vocab_size": args.vocab_size, "divisible_by": args.make_vocab_size_divisible_by}
        loss = vocab_parallel_cross_entropy(
            logits_fp64.unsqueeze(1), target_ids.unsqueeze(1), **vocabulary, group=parallel.group
        )
        result[0] = -loss[:, 0]
        result[1] = vocab_parallel_argmax(logits_fp64, **vocabulary, group=parallel.group)
    if stage.pipe.size > 1:
        dist.broadcast(result, stage.pipe.ranks[stage.stages[-1]], group=stage.pipe.handle)
    return result.cpu()
