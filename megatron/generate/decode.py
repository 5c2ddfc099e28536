"""The generation loop, and the checks of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.errors import DataError, NumericsError
from megatron.generate.sampling import NO_TOKEN, Sampling, TokenSampler, keys_of, make_sampler
from megatron.models.common.generation import (
    CachedDecoder,
    ModelStage,
    TokenRows,
    broadcast_tokens,
    get_model_stage,
    pad_rows,
)
from megatron.models.common.model_args import ModelArgs
from megatron.models.t5.generate import CachedT5
from megatron.models.t5.layers import T5ModelArgs

# Checks of requests; identical on every rank, and made before any collective.

DEFAULT_NEW_TOKENS = 64
"""Default number of new tokens per row."""


def check_rows(rows_name: str, rows: TokenRows, vocab_size: int) -> None:
    """Check the tokens of the user's rows.

    Args:
        rows_name: name of the rows in messages.

    Raises:
        DataError: there are no rows, a row is empty, or a token is outside the vocabulary.
    """
    if not rows or not all(len(row) for row in rows):
        lengths = [len(row) for row in rows]
        raise DataError(f"{rows_name} must be one or more rows of one or more tokens, got rows of lengths {lengths}")
    for row_idx, row in enumerate(rows):
        invalid = [token for token in row if not 0 <= token < vocab_size]
        if invalid:
            raise DataError(
                f"tokens of {rows_name} must be from 0 to {vocab_size - 1}, got {invalid[0]} in row {row_idx}. "
                "Were they encoded with another tokenizer?"
            )


def limits_of(rows_name: str, lengths: Sequence[int], max_new_tokens: int | None, positions: int | None) -> list[int]:
    """Return the maximum number of new tokens per row: ``max_new_tokens``, or by default at most 64.

    The default is lowered if the learned positions do not suffice. The model does not read the last new token, so that
    token needs no position.

    Args:
        rows_name: name of the rows in messages.
        lengths: number of existing tokens in each row.
        positions: number of learned positions; None: unlimited.

    Raises:
        DataError: ``max_new_tokens`` is below 1, or a row and its new tokens exceed the positions.
    """
    if max_new_tokens is not None and max_new_tokens < 1:
        raise DataError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    limits = []
    for row_number, length in enumerate(lengths, 1):
        num_free = positions - length + 1 if positions is not None else None
        limit = max_new_tokens or DEFAULT_NEW_TOKENS
        if num_free is not None and num_free < (max_new_tokens or 1):
            new_text = f" and {max_new_tokens} new ones, of which all but the last are read" if max_new_tokens else ""
            raise DataError(
                f"{rows_name} {row_number} has {length} tokens{new_text}. They must fit into the model's {positions} "
                f"learned positions (--max-position-embeddings). {_fix_hint(num_free, max_new_tokens)}"
            )
        limits.append(limit if num_free is None else min(limit, num_free))
    return limits


def _fix_hint(num_free: int, max_new_tokens: int | None) -> str:
    return f"Generate at most {num_free} new tokens, or shorten it" if max_new_tokens and num_free > 0 else "Shorten it"


def check_length(rows_name: str, lengths: Sequence[int], positions: int) -> None:
    """Check that rows fit into the learned positions; no new tokens are appended to these rows.

    Args:
        rows_name: name of the rows in messages.
        lengths: number of tokens in each row.
        positions: number of learned positions.

    Raises:
        DataError: a row has more tokens than there are positions.
    """
    for row_number, length in enumerate(lengths, 1):
        if length > positions:
            raise DataError(
                f"{rows_name} {row_number} has {length} tokens and must fit into the model's {positions} learned "
                "positions (--max-position-embeddings). Shorten it"
            )


# The generation loop: choose a token for each row and feed it to the model, until all rows have ended.

OnToken = Callable[[int, int], Any]
"""Called with (row, token) for each new token, on every rank."""
EndCondition = Callable[[int, Sequence[int]], bool]
"""Function from (row, its new tokens) to True if they end the row; the same on every rank."""


def generate(
    stage: ModelStage,
    reader: Any,
    initial_rows: TokenRows,
    *,
    limits: Sequence[int],
    eos_id: int | None,
    choose: TokenSampler,
    on_token: OnToken | None = None,
    ends: EndCondition | None = None,
) -> list[list[int]]:
    """Return the new tokens of each row, up to and including ``eos_id`` or up to the row's limit. Collective.

    Args:
        reader: a ``CachedModel``, or another object with the methods ``read`` and ``keep``.
        initial_rows: the initial rows, of any length above 0.
        limits: maximum number of new tokens of each row, at least 1.
        eos_id: token that ends a row; None: no token does.
        ends: additional condition that ends a row.

    Raises:
        NumericsError: a logit is NaN; raised on every rank.
    """
    new_tokens: list[list[int]] = [[] for _ in initial_rows]
    rows = list(range(len(initial_rows)))
    tokens, last_idx = pad_rows(initial_rows)
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    for step in range(max(limits)):
        logits = reader.read(tokens, positions, last_idx)
        for row, token in zip(rows, _choose_tokens(stage, logits, choose, rows, step), strict=True):
            new_tokens[row].append(token)
            if on_token is not None:
                on_token(row, token)
        unfinished = [
            idx
            for idx, row in enumerate(rows)
            if new_tokens[row][-1] != eos_id
            and len(new_tokens[row]) < limits[row]
            and not (ends and ends(row, new_tokens[row]))
        ]
        if not unfinished:
            break
        if len(unfinished) < len(rows):
            reader.keep(unfinished)
            rows = [rows[idx] for idx in unfinished]
        tokens = torch.tensor([[new_tokens[row][-1]] for row in rows])  # [b, 1]
        positions = torch.tensor([[len(initial_rows[row]) + step] for row in rows])
        last_idx = torch.zeros(len(rows), dtype=torch.long)
    return new_tokens


def _choose_tokens(
    stage: ModelStage, logits: torch.Tensor | None, choose: TokenSampler, rows: list[int], step: int
) -> list[int]:
    """Return the tokens that the last stage chooses, on every rank."""
    local_tokens = None if logits is None else choose(logits, rows, step)
    tokens = broadcast_tokens(stage, local_tokens, len(rows))
    if (tokens == NO_TOKEN).any():
        raise NumericsError(
            "logits must be finite, got NaN. Check that the weights are finite, or load another checkpoint."
        )
    return tokens.tolist()


# Generation with decoders (``generation`` of a family's ``ModelParts``).


def generate_gpt2(
    model: Any,
    prompts: TokenRows,
    *,
    max_new_tokens: int | None = None,
    eos_id: int | None = None,
    sampling: Sampling | None = None,
    keys: Sequence[bytes] | None = None,
    on_token: OnToken | None = None,
    ends: EndCondition | None = None,
) -> list[list[int]]:
    """Return the continuation of each prompt by a decoder, without the prompt. Collective over the replica.

    Prompts may have different lengths; the result of a prompt does not depend on the others.

    Args:
        model: as in ``get_model_stage``.
        prompts: rows of tokens, the same on every rank of the replica.
        max_new_tokens: maximum per prompt; None: 64, or fewer if the learned positions do not suffice.
        eos_id: token that ends a row, and is its last token; None: no token does.
        sampling: None: choose the most likely token each time.
        keys: keys of the random numbers; None: ``keys_of(prompts)``.
        on_token: called with (row, token) for each new token, on every rank.
        ends: called with (row, new tokens of the row); returns True if the row ends there, for example after a stop
            string. The result must be the same on every rank.

    Raises:
        TypeError: the model is not a decoder.
        DataError: rows are empty or contain tokens outside the vocabulary, or rows and new tokens exceed the positions.
        NumericsError: logits are NaN.
    """
    stage = get_model_stage(model)
    args = stage.args
    if isinstance(args, T5ModelArgs):
        raise TypeError("generate_gpt2 needs a decoder, got an encoder-decoder. Use generate_t5.")
    limits = gpt2_limits(args, prompts, max_new_tokens)
    capacity = max(len(prompt) + limit - 1 for prompt, limit in zip(prompts, limits, strict=True))
    choose = make_sampler(stage, sampling, keys_of(prompts) if keys is None else keys)
    with stage.evaluation_mode():
        reader = CachedDecoder(stage, capacity)
        options = {"limits": limits, "eos_id": eos_id, "choose": choose, "on_token": on_token, "ends": ends}
        return generate(stage, reader, prompts, **options)  # type: ignore[arg-type]


def gpt2_limits(args: ModelArgs, prompts: TokenRows, max_new_tokens: int | None) -> list[int]:
    """Return the maximum number of new tokens per prompt.

    Raises:
        DataError: prompts are empty or contain tokens outside the vocabulary, or prompts and new tokens exceed the
            positions.
    """
    check_rows("prompts", prompts, args.vocab_size)
    positions = args.max_position_embeddings if args.has_position_ids else None
    return limits_of("prompt", [len(prompt) for prompt in prompts], max_new_tokens, positions)


def generate_t5(
    model: Any,
    sources: TokenRows,
    *,
    start_id: int,
    max_new_tokens: int | None = None,
    eos_id: int | None = None,
    sampling: Sampling | None = None,
    keys: Sequence[bytes] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Return the output of T5's decoder for each source, without ``start_id``. Collective over the replica.

    Sources may have different lengths; the result of a source does not depend on the others.

    Args:
        model: as in ``get_model_stage``.
        sources: the encoder's rows of tokens, the same on every rank of the replica. They end like the model's inputs
            in training (``T5Tokens.eos_id``).
        start_id: the decoder's first token (``T5Tokens.start_id``).
        max_new_tokens, eos_id, sampling, keys, on_token: as in ``generate_gpt2``.

    Raises:
        TypeError: the model is not a T5.
        DataError: rows are empty or contain tokens outside the vocabulary, or rows and new tokens exceed the positions.
        NumericsError: logits are NaN.
    """
    stage = get_model_stage(model)
    args = stage.args
    if not isinstance(args, T5ModelArgs):
        raise TypeError("generate_t5 needs a T5, got a model without a separate decoder. Use generate_gpt2.")
    check_rows("start_id", [[start_id]], args.vocab_size)
    limits = t5_limits(args, sources, max_new_tokens)
    choose = make_sampler(stage, sampling, keys_of(sources) if keys is None else keys)
    with stage.evaluation_mode():
        reader = CachedT5(stage, sources, max(limits))
        initial_rows = [[start_id]] * len(sources)
        return generate(stage, reader, initial_rows, limits=limits, eos_id=eos_id, choose=choose, on_token=on_token)


def t5_limits(args: T5ModelArgs, sources: TokenRows, max_new_tokens: int | None) -> list[int]:
    """Return the maximum number of tokens per answer.

    Raises:
        DataError: sources are empty or contain tokens outside the vocabulary, or sources or answers exceed the
            positions.
    """
    check_rows("sources", sources, args.vocab_size)
    positions = None if args.is_relative else args.max_position_embeddings
    if positions is not None:
        check_length("prompt", [len(source) for source in sources], positions)
    return limits_of("the start of answer", [1] * len(sources), max_new_tokens, positions)
