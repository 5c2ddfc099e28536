"""DecoderLM: an adapter for lm_eval (the Language Model Evaluation Harness). Imports lm_eval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.model import LM

from megatron.errors import DataError
from megatron.evaluation.all_ranks import DistributedModel, GenerationArgs
from megatron.evaluation.scoring import Row, make_row, rolling_rows
from megatron.generate.sampling import Sampling
from megatron.generate.text import opening_ids
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.chat import ChatTemplate

# Texts are encoded as in lm_eval's Hugging Face model, so that results are comparable:
#
# * Spaces at the end of a context belong to the continuation.
# * Context and continuation are encoded together. If the context alone has n tokens, the tokens after the first n are
#   the continuation.
# * A context that is too long is truncated at its start.
# * An empty context is replaced by the token that precedes each document in training.

MAX_NEW_TOKENS = 256
"""Default maximum for generated texts if a task specifies none, as in lm_eval."""


class DecoderLM(LM):  # type: ignore[misc]
    """Scores and generates texts with a decoder; created by rank 0, within
    ``DistributedModel.run_from_rank_0``.

    Args:
        chat: renders messages if a chat template is applied.
        add_bos_token: start each context with the bos_token, unless a chat template has written it. None follows the
            tokenizer's setting.
    """

    def __init__(
        self, model: DistributedModel, *, chat: ChatTemplate | None = None, add_bos_token: bool | None = None
    ) -> None:
        super().__init__()
        self.model, self.chat = model, chat
        self.tokenizer: Tokenizer = model.prompts.tokenizer
        self._opening = opening_ids(self.tokenizer, add_bos_token)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score each continuation: (log-probability, True if it is the greedy continuation)."""
        rows = [self.request_row(*request.args) for request in requests]
        scores = [(score.logprob, score.is_greedy) for score in self.model.score(rows)]
        self._cache_results("loglikelihood", requests, scores)
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Sum the log-probabilities over each request's full text; each token is predicted once."""
        length = self.model.max_length
        rows_by_text = [rolling_rows(self.encode(request.args[0]), self.prefix, length) for request in requests]
        scores = iter(self.model.score([row for rows in rows_by_text for row in rows]))
        logprobs = [math.fsum(next(scores).logprob for _ in rows) for rows in rows_by_text]
        self._cache_results("loglikelihood_rolling", requests, logprobs)
        return logprobs

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation for each request's context, up to and excluding a stop string.

        With a chat template, an end-of-turn token also ends the text.
        """
        groups: dict[GenerationArgs, list[int]] = {}
        end_id = None if self.chat is None else self.chat.stop_id
        for idx, request in enumerate(requests):
            groups.setdefault(replace(parse_generation_kwargs(request.args[1]), end_id=end_id), []).append(idx)
        texts_by_idx: dict[int, str] = {}
        for generation_args, indices in groups.items():
            max_prompt_length = self.model.max_length - generation_args.max_new_tokens
            if max_prompt_length < 1:
                raise DataError(
                    f"a task must generate fewer tokens than the model's maximum length {self.model.max_length}, got "
                    f"{generation_args.max_new_tokens}. Lower max_gen_toks of the task, or raise --max-length"
                )
            prompts = [self._with_opening(self.encode(requests[idx].args[0])) or [self.prefix] for idx in indices]
            texts_by_idx.update(
                zip(
                    indices,
                    self.model.generate([prompt[-max_prompt_length:] for prompt in prompts], generation_args),
                    strict=True,
                )
            )
        texts = [texts_by_idx[idx] for idx in range(len(requests))]
        self._cache_results("generate_until", requests, texts)
        return texts

    @property
    def prefix(self) -> int:
        """Token that precedes each text: the last token that the tokenizer adds, or the end-of-document token."""
        return self._opening[-1] if self._opening else self.tokenizer.eod_id

    @property
    def tokenizer_name(self) -> str:
        """Key for the tokenizer and the chat template in lm_eval's request cache."""
        return f"{self.tokenizer.identity}-{self.chat.key if self.chat else ''}".replace("/", "_")

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.chat.text if self.chat is not None and chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render messages; without ``add_generation_prompt`` the last message is left open to be continued."""
        assert self.chat is not None
        if add_generation_prompt:
            return self.chat.render(chat_history, add_generation_prompt=True)
        *previous, last = chat_history
        return self.chat.render(previous, add_generation_prompt=True) + last["content"]

    def encode(self, text: str) -> list[int]:
        """Encode ``text``; in a rendered conversation, spelled-out control tokens are recognised."""
        if self.chat is None:
            return self.tokenizer.encode(text)
        return self.chat.tokenizer.encode_rendered(text)[0]

    def request_row(self, context: str, continuation: str) -> Row:
        """Build the row that scores ``continuation`` after ``context``."""
        if not context:
            tokens = self.encode(continuation)
            self._require_tokens(tokens, continuation)
            if tokens[0] == self.prefix and len(tokens) > 1:  # starts with the prefix already
                return make_row(tokens[:1], tokens[1:], self.model.max_length)
            return make_row([self.prefix], tokens, self.model.max_length)
        stripped = context.rstrip()
        context, continuation = stripped, context[len(stripped) :] + continuation
        context_ids = self.encode(context)
        tokens = self.encode(context + continuation)[len(context_ids) :] or self.encode(continuation)
        self._require_tokens(tokens, continuation)
        return make_row(self._with_opening(context_ids) or [self.prefix], tokens, self.model.max_length)

    def _with_opening(self, tokens: list[int]) -> list[int]:
        """Prepend the bos_token to a context, unless a chat template has written it."""
        is_opened = tokens[: len(self._opening)] == self._opening
        return tokens if is_opened else [*self._opening, *tokens]

    def _require_tokens(self, tokens: Sequence[int], continuation: str) -> None:
        if not tokens:
            raise DataError(
                f"a continuation must add at least one token to its context, got {continuation!r}. Correct the "
                "doc_to_choice or doc_to_target of the task"
            )

    def _cache_results(self, request_type: str, requests: Sequence[Any], results: Sequence[Any]) -> None:
        """Add results to lm_eval's cache."""
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(request_type, request.args, result)


_LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def parse_generation_kwargs(generation_kwargs: dict[str, Any]) -> GenerationArgs:
    """Parse a task's ``generation_kwargs``.

    Raises:
        DataError: a setting is not supported.
    """
    remaining = dict(generation_kwargs)
    lengths = [remaining.pop(name) for name in _LENGTH_KEYS if name in remaining]
    until = remaining.pop("until", None) or []
    stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
    temperature, do_sample = remaining.pop("temperature", None), remaining.pop("do_sample", None)
    is_sampled = bool(temperature) if do_sample is None else bool(do_sample) and temperature != 0
    truncation: dict[str, Any] = {
        "top_k": int(remaining.pop("top_k", 0) or 0),
        "top_p": float(remaining.pop("top_p", 1.0) or 1.0),
    }
    if remaining:
        raise DataError(
            f"generation_kwargs of a task may contain until, {', '.join(_LENGTH_KEYS)}, do_sample, temperature, top_k, "
            f"top_p, got {', '.join(sorted(remaining))}. Remove them"
        )
    sampling = Sampling(temperature=float(temperature or 1.0), **truncation) if is_sampled else None
    return GenerationArgs(lengths[0] if lengths else MAX_NEW_TOKENS, stops, sampling)
