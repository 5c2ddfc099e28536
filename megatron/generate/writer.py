"""Texts in, texts out: a model and its tokenizer, over the replicas of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.generate.gpt2 import generate_gpt2, gpt2_limits
from megatron.generate.part import Part
from megatron.generate.prompts import Prompts
from megatron.generate.sampling import Sampling, keys_of
from megatron.generate.t5 import generate_t5, t5_limits
from megatron.model.sizes import T5Sizes
from megatron.mpu.groups import SINGLE, Group

OnText = Callable[[str], Any]


@dataclass(frozen=True)
class Answer:
    """What a model made of a prompt.

    Args:
        text: without the prompt, and without the token that ended it.
        tokens: with it.
        is_ended: the model ended it; else it was cut at its number of tokens.
    """

    prompt: str
    text: str
    tokens: list[int]
    num_prompt_tokens: int
    is_ended: bool


@dataclass(frozen=True)
class Writer:
    """Answers prompts.

    Args:
        part: what this rank holds of the model.
        data: the replicas, which share the prompts.
        batch_size: prompts that go through the model together.
        max_new_tokens: of each answer; None: 64, or fewer where the learned positions end.
        sampling: None: the likeliest token each time.
    """

    part: Part
    prompts: Prompts
    data: Group = SINGLE
    batch_size: int = 8
    max_new_tokens: int | None = None
    sampling: Sampling | None = None

    def answer(self, texts: Sequence[str], on_text: OnText | None = None) -> list[Answer]:
        """Return the answer to each of ``texts``, the same on every rank. Collective over all ranks.

        What a text gets depends neither on the layout nor on the other texts, but for drawing: of equal texts each gets
        numbers of its own.

        Args:
            on_text: called with each new piece of the answer as it comes; for one text.

        Raises:
            DataError: a text that the model cannot take.
        """
        rows = [self.prompts.encode(text) for text in texts]
        self._check(rows)
        keys = keys_of(rows)
        by_length = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        own = by_length[self.data.rank :: self.data.size]
        found: dict[int, list[int]] = {}
        for first in range(0, len(own), self.batch_size):
            batch = own[first : first + self.batch_size]
            on_token = streaming(self.prompts, rows[batch[0]], on_text) if on_text is not None else None
            given = {"keys": [keys[place] for place in batch], "on_token": on_token}
            found.update(zip(batch, self._generate([rows[place] for place in batch], **given), strict=True))
        told = self.data.gather_objects(found)
        found = {place: tokens for one in told for place, tokens in one.items()}
        return [
            self._answer(text, row, found[place]) for place, (text, row) in enumerate(zip(texts, rows, strict=True))
        ]

    def _check(self, rows: list[list[int]]) -> None:
        """Check all rows at once: their numbers are then those of the user's prompts."""
        sizes = self.part.sizes
        if isinstance(sizes, T5Sizes):
            t5_limits(sizes, rows, self.max_new_tokens)
        else:
            gpt2_limits(sizes, rows, self.max_new_tokens)

    def _generate(self, rows: list[list[int]], **others: Any) -> list[list[int]]:
        prompts = self.prompts
        given = {"max_new_tokens": self.max_new_tokens, "eos_id": prompts.eos_id, "sampling": self.sampling, **others}
        if prompts.tokens is not None:
            return generate_t5(self.part, rows, start_id=prompts.tokens.start_id, **given)
        return generate_gpt2(self.part, rows, **given)

    def _answer(self, text: str, row: list[int], tokens: list[int]) -> Answer:
        is_ended = tokens[-1] == self.prompts.eos_id
        return Answer(text, self.prompts.decode(tokens, behind=row), tokens, len(row), is_ended)


def streaming(prompts: Prompts, row: list[int], on_text: OnText) -> Callable[[int, int], None]:
    """Return what takes (row, token) and tells the text behind the prompt ``row`` as soon as it is whole characters."""
    tokens: list[int] = []
    shown = ""

    def on_token(_: int, token: int) -> None:
        nonlocal shown
        tokens.append(token)
        text = prompts.decode(tokens, behind=row)
        if text.startswith(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            on_text(text[len(shown) :])
            shown = text

    return on_token
