"""A model of this project as lm_eval (the Language Model Evaluation Harness) asks it. Imports lm_eval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.model import LM

from megatron.errors import DataError
from megatron.evaluation.all_ranks import ModelOfAllRanks, Writing
from megatron.evaluation.scoring import Row, rolling_rows, row_of
from megatron.generate.sampling import Sampling
from megatron.generate.text import opening_ids
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.chat import ChatTemplate

# Texts become tokens as lm_eval's own model of Hugging Face does it, so that numbers are comparable: spaces at the end
# of a context belong to the continuation; context and continuation are encoded together, and the continuation is what
# lies behind the context's own number of tokens; too long a context loses its beginning. An empty context is the token
# behind which documents begin.

MAX_NEW_TOKENS = 256
"""Of a text that a task lets the model write without saying how long; lm_eval's own number."""


class DecoderLM(LM):  # type: ignore[misc]
    """Scores and writes with a decoder; rank 0 makes it, within ``ModelOfAllRanks.lead``.

    Args:
        chat: what renders messages, where tasks are asked with a chat template.
        add_bos_token: start each context with the bos_token, unless a chat template has written it; None: if the
            tokenizer does so.
    """

    def __init__(
        self, model: ModelOfAllRanks, *, chat: ChatTemplate | None = None, add_bos_token: bool | None = None
    ) -> None:
        super().__init__()
        self.model, self.chat = model, chat
        self.tokenizer: Tokenizer = model.prompts.tokenizer
        self._front = opening_ids(self.tokenizer, add_bos_token)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log-probability, whether it is the likeliest text) of each request's continuation."""
        rows = [self.row(*request.args) for request in requests]
        scores = [(score.logprob, score.is_greedy) for score in self.model.score(rows)]
        self._keep("loglikelihood", requests, scores)
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each request's whole text; each of its tokens is predicted once."""
        length = self.model.max_length
        texts = [rolling_rows(self.encode(request.args[0]), self.prefix, length) for request in requests]
        scores = iter(self.model.score([row for rows in texts for row in rows]))
        sums = [math.fsum(next(scores).logprob for _ in rows) for rows in texts]
        self._keep("loglikelihood_rolling", requests, sums)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes behind each request's context, up to a stop, which is left out.

        With a chat template the end of a turn is one, too.
        """
        groups: dict[Writing, list[int]] = {}
        end_id = None if self.chat is None else self.chat.stop_id
        for place, request in enumerate(requests):
            groups.setdefault(replace(writing_of(request.args[1]), end_id=end_id), []).append(place)
        found: dict[int, str] = {}
        for how, places in groups.items():
            room = self.model.max_length - how.max_new_tokens
            if room < 1:
                raise DataError(
                    f"a task must let the model write fewer tokens than the {self.model.max_length} that it reads, got "
                    f"{how.max_new_tokens}. Lower max_gen_toks of the task, or raise --max-length"
                )
            prompts = [self._opened(self.encode(requests[place].args[0])) or [self.prefix] for place in places]
            found.update(zip(places, self.model.write([prompt[-room:] for prompt in prompts], how), strict=True))
        texts = [found[place] for place in range(len(requests))]
        self._keep("generate_until", requests, texts)
        return texts

    @property
    def prefix(self) -> int:
        """The token behind which texts begin."""
        return self._front[-1] if self._front else self.tokenizer.eod_id

    @property
    def tokenizer_name(self) -> str:
        """What lm_eval's cache of requests tells tokenizers and chat templates apart by."""
        return f"{self.tokenizer.identity}-{self.chat.key if self.chat else ''}".replace("/", "_")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the text of the chat template."""
        return self.chat.text if self.chat is not None and chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return messages as a text; without ``add_generation_prompt`` the last of them is to go on."""
        assert self.chat is not None
        if add_generation_prompt:
            return self.chat.render(chat_history, add_generation_prompt=True)
        *ahead, last = chat_history
        return self.chat.render(ahead, add_generation_prompt=True) + last["content"]

    def encode(self, text: str) -> list[int]:
        """Return tokens; in a rendered conversation what spells a control token is that token."""
        if self.chat is None:
            return self.tokenizer.encode(text)
        return self.chat.tokenizer.encode_rendered(text)[0]

    def row(self, context: str, continuation: str) -> Row:
        """Return the row that scores ``continuation`` behind ``context``."""
        if not context:
            tokens = self.encode(continuation)
            self._require(tokens, continuation)
            if tokens[0] == self.prefix and len(tokens) > 1:  # it has one already
                return row_of(tokens[:1], tokens[1:], self.model.max_length)
            return row_of([self.prefix], tokens, self.model.max_length)
        kept = context.rstrip()
        context, continuation = kept, context[len(kept) :] + continuation
        own = self.encode(context)
        tokens = self.encode(context + continuation)[len(own) :] or self.encode(continuation)
        self._require(tokens, continuation)
        return row_of(self._opened(own) or [self.prefix], tokens, self.model.max_length)

    def _opened(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a context after the bos_token, which a chat template may have written already."""
        has_it = tokens[: len(self._front)] == self._front
        return tokens if has_it else [*self._front, *tokens]

    def _require(self, tokens: Sequence[int], continuation: str) -> None:
        if not tokens:
            raise DataError(
                f"a continuation must have a token of its own behind its context, got {continuation!r}. Correct the "
                "task: its doc_to_choice, or doc_to_target"
            )

    def _keep(self, kind: str, requests: Sequence[Any], results: Sequence[Any]) -> None:
        """Give lm_eval's cache of results what it may keep."""
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(kind, request.args, result)


_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def writing_of(given: dict[str, Any]) -> Writing:
    """Return how a task wants a text written: its ``generation_kwargs``.

    Raises:
        DataError: something that this project cannot do.
    """
    left = dict(given)
    lengths = [left.pop(name) for name in _LENGTHS if name in left]
    until = left.pop("until", None) or []
    stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
    temperature, is_asked = left.pop("temperature", None), left.pop("do_sample", None)
    is_drawn = bool(temperature) if is_asked is None else bool(is_asked) and temperature != 0
    drawing: dict[str, Any] = {"top_k": int(left.pop("top_k", 0) or 0), "top_p": float(left.pop("top_p", 1.0) or 1.0)}
    if left:
        raise DataError(
            f"generation_kwargs of a task may be until, {', '.join(_LENGTHS)}, do_sample, temperature, top_k, top_p, "
            f"got {', '.join(sorted(left))}. Leave it out"
        )
    sampling = Sampling(temperature=float(temperature or 1.0), **drawing) if is_drawn else None
    return Writing(lengths[0] if lengths else MAX_NEW_TOKENS, stops, sampling)
