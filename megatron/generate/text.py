"""Prompts, answers, a conversation."""

from __future__ import annotations

import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron import log
from megatron.errors import DataError
from megatron.generate.decode import generate_gpt2, generate_t5, gpt2_limits, t5_limits
from megatron.generate.sampling import Sampling, keys_of
from megatron.models.common.generation import ModelStage
from megatron.models.t5.data import T5Tokens
from megatron.models.t5.layers import T5ModelArgs
from megatron.mpu.groups import SINGLE, Group
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.chat import ASSISTANT, ChatTemplate, special_names

# A person's text as the tokens that a model reads, and what it says as text.

SENTINEL = "<extra_id_{}>"
"""How a text spells the place of a span, whatever the vocabulary calls it; the first is number 0."""
_SENTINEL = re.compile(r"\s*<extra_id_(\d+)>")
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Stands for an id that the tokenizer does not have: the model's table may be larger."""


class Prompts:
    """Texts to tokens and back for one model.

    Text that spells another control token is ordinary text, as in training.

    Args:
        tokens: T5's control tokens; None: a GPT-2.
        mode: the kind of denoiser (R, X, S) whose token opens the inputs; for a T5 that was trained with several.
        adds_bos: start a decoder's prompts with the tokens that the tokenizer puts in front of a text; None: if it
            does so; True: with its bos_token in any case.

    Raises:
        DataError: If ``mode`` is not one of the model's, or ``adds_bos`` is True and the tokenizer has no bos_token.
    """

    def __init__(
        self, tokenizer: Tokenizer, tokens: T5Tokens | None, mode: str | None = None, *, adds_bos: bool | None = None
    ) -> None:
        self.tokenizer, self.tokens = tokenizer, tokens
        modes = {} if tokens is None else tokens.modes
        if mode is not None and mode not in modes:
            raise DataError(
                f"--mode must be one that the model was trained with, got {mode}; this one "
                f"{'has ' + ', '.join(modes) if modes else 'has none (several --denoisers make them)'}."
            )
        self.opening = [modes[mode or next(iter(modes))]] if modes else []
        if tokens is None:
            self.opening = opening_ids(tokenizer, adds_bos)

    @property
    def eos_id(self) -> int | None:
        """The token that ends what the model says; None: the vocabulary has none."""
        if self.tokens is not None:
            return self.tokens.eos_id
        return self.tokenizer.eod_id if self.tokenizer.has_eod else None

    def encode(self, text: str) -> list[int]:
        """Return what the model reads.

        Decoder: bos where the tokenizer adds it, text; for an empty prompt without bos the end-of-document token,
        since documents begin after one.
        T5: mode token, text with its sentinels, end.

        Raises:
            DataError: a sentinel that the model does not have, or an empty text without a token to start from.
        """
        if self.tokens is not None:
            return [*self.opening, *self._with_sentinels(text), self.tokens.eos_id]
        return [*self.opening, *self.tokenizer.encode(text)] or [self.tokenizer.eod_id]

    def _with_sentinels(self, text: str) -> list[int]:
        """Return the tokens of ``text``. What follows a sentinel is encoded as the rest of the text, not as a new one;
        blanks before a sentinel go, since the words of a span carry their own."""
        ids: list[int] = []
        pieces: list[str] = []
        known = 0
        for place, part in enumerate(_SENTINEL.split(text)):
            if place % 2:
                ids.append(self._sentinel(int(part)))
            elif part:
                pieces.append(part)
                tokens = self.tokenizer.encode_pieces(pieces).tolist()
                ids += tokens[known:]
                known = len(tokens)
        return ids

    def _sentinel(self, number: int) -> int:
        assert self.tokens is not None
        if number >= len(self.tokens.sentinels):
            there = len(self.tokens.sentinels)
            raise DataError(
                f"{SENTINEL.format(number)} must be one of the model's {there} sentinels, "
                f"{SENTINEL.format(0)} to {SENTINEL.format(there - 1)}"
                if there
                else f"{SENTINEL.format(number)} stands for a span, and this model has no sentinels"
            )
        return self.tokens.sentinels[number]

    def decode(self, ids: Sequence[int], *, behind: Sequence[int] = ()) -> str:
        """Return the text of what the model said, without its end.

        Args:
            behind: the prompt, for a GPT-2: whether a word begins with a blank may hang on what is before it.
        """
        said = list(ids[:-1] if ids and ids[-1] == self.eos_id else ids)
        if self.tokens is not None:
            return " ".join(text.strip() for text in self._texts(said))
        before, whole = "".join(self._texts(behind)), "".join(self._texts([*behind, *said]))
        return whole[len(before) :] if whole.startswith(before) else "".join(self._texts(said))

    def _texts(self, ids: Sequence[int]) -> Iterator[str]:
        """Yield the text of each run of ordinary ids, and the name of each sentinel."""
        names = {}
        if self.tokens is not None:
            names = {token: SENTINEL.format(number) for number, token in enumerate(self.tokens.sentinels)}
        size = self.tokenizer.vocab_size
        for (is_sentinel, is_known), run in groupby(ids, lambda token: (token in names, token < size)):
            if is_sentinel:
                yield from (names[token] for token in run)
            else:
                same = list(run)
                yield self.tokenizer.decode(same) if is_known else UNKNOWN * len(same)


def opening_ids(tokenizer: Tokenizer, adds_bos: bool | None) -> list[int]:
    """Return the ids in front of a decoder's prompt, with ``adds_bos`` as in ``Prompts``.

    Raises:
        DataError: If ``adds_bos`` is True and the tokenizer has no bos_token.
    """
    if adds_bos is False:
        return []
    if tokenizer.opening_ids or adds_bos is None:
        return list(tokenizer.opening_ids)
    name = special_names(tokenizer).get("bos_token")
    token = None if name is None else tokenizer.token_to_id(name)
    if token is None:
        raise DataError("--add-bos-token needs a tokenizer that names its bos_token, got none. Leave it out")
    return [token]


class ChatPrompts(Prompts):
    """Texts as a user's turns of a conversation, rendered by a chat template; what the model says ends a turn.

    Args:
        template: with the tokenizer.
        system: the message that opens each conversation; None: none does.

    Attributes:
        history: the turns up to now, as ``remember`` adds them; empty where each text is a conversation of its own.
    """

    def __init__(self, template: ChatTemplate, system: str | None = None) -> None:
        super().__init__(template.tokenizer, None)
        self.template = template
        self.opening_messages = [] if system is None else [{"role": "system", "content": system}]
        self.history: list[dict[str, str]] = []

    @property
    def eos_id(self) -> int | None:
        """The token that the template ends the assistant's turn with, else that which ends a document."""
        stop_id = self.template.stop_id
        return stop_id if stop_id is not None else super().eos_id

    def encode(self, text: str) -> list[int]:
        """Return the tokens of the conversation with ``text`` as the user's next turn, up to where the model speaks.

        Raises:
            DataError: the template refuses it.
        """
        return self.template.prompt_ids([*self.opening_messages, *self.history, _turn("user", text)])

    def remember(self, text: str, answer: str) -> None:
        """Let a turn of the user and the answer to it be part of the conversation."""
        self.history += [_turn("user", text), _turn(ASSISTANT, answer)]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def with_gaps_filled(text: str, spans: str) -> str:
    """Return ``text`` with what T5 said for each sentinel in its place, in brackets; [...] where it said nothing.

    Args:
        spans: what it said: each sentinel with its span behind it.
    """
    said = _SENTINEL.split(spans)
    found = dict(zip(said[1::2], (span.strip() for span in said[2::2]), strict=True))
    return re.sub(r"<extra_id_(\d+)>", lambda gap: f"[{found.get(gap[1]) or '...'}]", text)


# Texts in, texts out: a model and its tokenizer, over the replicas of a job.

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
class TextGenerator:
    """Answers prompts.

    Args:
        part: what this rank holds of the model.
        data: the replicas, which share the prompts.
        batch_size: prompts that go through the model together.
        max_new_tokens: of each answer; None: 64, or fewer where the learned positions end.
        sampling: None: the likeliest token each time.
    """

    part: ModelStage
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
        rows = self.encoded(texts)
        keys = keys_of(rows)
        by_length = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        own = by_length[self.data.rank :: self.data.size]
        found: dict[int, list[int]] = {}
        for first in range(0, len(own), self.batch_size):
            batch = own[first : first + self.batch_size]
            on_token = streaming(self.prompts, rows[batch[0]], on_text) if on_text is not None else None
            given = {"keys": [keys[place] for place in batch], "on_token": on_token}
            found.update(zip(batch, self._generate([rows[place] for place in batch], **given), strict=True))
        answers = self.data.gather_objects(found)
        found = {place: tokens for one in answers for place, tokens in one.items()}
        return [
            self._answer(text, row, found[place]) for place, (text, row) in enumerate(zip(texts, rows, strict=True))
        ]

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of all texts; checked at once, so that their numbers are those of the user's prompts.

        Raises:
            DataError: a text that the model cannot take.
        """
        rows, sizes = [self.prompts.encode(text) for text in texts], self.part.sizes
        if isinstance(sizes, T5ModelArgs):
            t5_limits(sizes, rows, self.max_new_tokens)
        else:
            gpt2_limits(sizes, rows, self.max_new_tokens)
        return rows

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


# A conversation line by line: each line is a prompt, and its answer comes as it is made.

ROUND_S = 60.0
"""Ranks hear from the one that reads the lines so often: a person may take longer than ranks wait for each other."""


def interactive(writer: TextGenerator, world: Group) -> None:
    """Answer each line of standard input on standard output, until it ends. Collective; rank 0 reads and writes.

    A line that cannot be answered is told, and the next one is read.
    """
    for line in _lines(world):
        if not line.strip():
            continue
        try:
            _answer(writer, _text(line), is_teller=world.rank == 0)
        except DataError as error:  # on every rank, ahead of anything that they do together
            log.info(str(error))


def _text(line: bytes) -> str:
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        raise DataError(f"a line must be a text in UTF-8: {error}") from None


def _answer(writer: TextGenerator, text: str, *, is_teller: bool) -> None:
    shown: list[str] = []

    def show(piece: str) -> None:
        shown.append(piece)
        if is_teller:
            sys.stdout.write(piece)
            sys.stdout.flush()

    (answer,) = writer.answer([text], show)
    if isinstance(writer.prompts, ChatPrompts):
        writer.prompts.remember(text, answer.text)
    if is_teller:
        sys.stdout.write(answer.text.removeprefix("".join(shown)) + "\n")  # what was no whole character, too
        sys.stdout.flush()


def _lines(world: Group) -> Iterator[bytes]:
    """Yield the lines of rank 0's standard input on every rank."""
    asked: queue.Queue[bytes] = queue.Queue()
    if world.rank == 0:
        threading.Thread(target=_read_lines, args=(asked,), daemon=True).start()
    while True:
        line = _next(asked, world)
        if line == b"":
            return
        if line is not None:
            yield line


def _read_lines(asked: queue.Queue[bytes]) -> None:
    while True:
        line = sys.stdin.buffer.readline()
        asked.put(line)
        if line == b"":
            return


def _next(asked: queue.Queue[bytes], world: Group) -> bytes | None:
    """Return the next line, nothing at the end, None when none came in a round."""
    line = None
    if world.rank == 0:
        with suppress(queue.Empty):
            line = asked.get(timeout=ROUND_S)
    return world.broadcast_object(line)
