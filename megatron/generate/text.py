"""Text generation: prompts, answers and interactive conversations."""

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

# Conversion between text and tokens.

SENTINEL = "<extra_id_{}>"
"""Spelling of a span's sentinel in text, independent of the vocabulary; the first is number 0."""
_SENTINEL = re.compile(r"\s*<extra_id_(\d+)>")
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Replaces ids that the tokenizer does not have: the model's table may be larger."""


class Prompts:
    """Conversion of texts to tokens and back for one model.

    Apart from T5's sentinels, special tokens spelled out in a text are encoded as ordinary text, as in training.

    Args:
        t5_tokens: T5's special tokens; None: the model is a decoder.
        mode: denoiser (R, X or S) whose mode token starts the inputs, for a T5 trained with several denoisers.
        adds_bos: start a decoder's prompts with the tokens that the tokenizer inserts before a text. None: only if the
            tokenizer inserts any; True: always, with its bos_token if the tokenizer inserts none.

    Raises:
        DataError: ``mode`` is not one of the model's modes, or ``adds_bos`` is True and the tokenizer has no bos_token.
    """

    def __init__(
        self, tokenizer: Tokenizer, t5_tokens: T5Tokens | None, mode: str | None = None, *, adds_bos: bool | None = None
    ) -> None:
        self.tokenizer, self.t5_tokens = tokenizer, t5_tokens
        modes = {} if t5_tokens is None else t5_tokens.modes
        if mode is not None and mode not in modes:
            raise DataError(
                f"--mode must be a mode that the model was trained with, got {mode}. This model "
                f"{'has ' + ', '.join(modes) if modes else 'has no modes, which need several --denoisers'}."
            )
        self.opening = [modes[mode or next(iter(modes))]] if modes else []
        if t5_tokens is None:
            self.opening = opening_ids(tokenizer, adds_bos)

    @property
    def eos_id(self) -> int | None:
        """The token that ends the model's output; None if the vocabulary has none."""
        if self.t5_tokens is not None:
            return self.t5_tokens.eos_id
        return self.tokenizer.eod_id if self.tokenizer.has_eod else None

    def encode(self, text: str) -> list[int]:
        """Return the model's input for ``text``.

        Decoder: the bos_token if the tokenizer adds one, then the text. An empty prompt without bos_token becomes the
        end-of-document token, because documents start after such a token in training.
        T5: the mode token, the text with its sentinels, the end token.

        Raises:
            DataError: the text has a sentinel that the model does not have, or it is empty and the tokenizer has
                neither a bos_token nor an end-of-document token.
        """
        if self.t5_tokens is not None:
            return [*self.opening, *self._encode_with_sentinels(text), self.t5_tokens.eos_id]
        return [*self.opening, *self.tokenizer.encode(text)] or [self.tokenizer.eod_id]

    def _encode_with_sentinels(self, text: str) -> list[int]:
        """Encode ``text`` and its sentinels.

        Text after a sentinel is encoded as a continuation, not as a new text. Blanks before a sentinel are removed,
        because the tokens of a span include the blank before its first word.
        """
        ids: list[int] = []
        segments: list[str] = []
        num_encoded = 0
        for idx, segment in enumerate(_SENTINEL.split(text)):
            if idx % 2:
                ids.append(self._sentinel_id(int(segment)))
            elif segment:
                segments.append(segment)
                tokens = self.tokenizer.encode_chunks(segments).tolist()
                ids += tokens[num_encoded:]
                num_encoded = len(tokens)
        return ids

    def _sentinel_id(self, sentinel_idx: int) -> int:
        assert self.t5_tokens is not None
        if sentinel_idx >= len(self.t5_tokens.sentinels):
            num_sentinels = len(self.t5_tokens.sentinels)
            raise DataError(
                f"{SENTINEL.format(sentinel_idx)} must be one of the model's {num_sentinels} sentinels, "
                f"{SENTINEL.format(0)} to {SENTINEL.format(num_sentinels - 1)}"
                if num_sentinels
                else f"{SENTINEL.format(sentinel_idx)} is a sentinel, and this model has no sentinels"
            )
        return self.t5_tokens.sentinels[sentinel_idx]

    def decode(self, ids: Sequence[int], *, prompt: Sequence[int] = ()) -> str:
        """Return the text of the model's output ``ids``, without the end token.

        Args:
            prompt: the prompt, for a decoder. It is needed because a tokenizer may drop the leading blank of the
                first token that it decodes.
        """
        output = list(ids[:-1] if ids and ids[-1] == self.eos_id else ids)
        if self.t5_tokens is not None:
            return " ".join(text.strip() for text in self._decode_runs(output))
        prompt_text, full_text = "".join(self._decode_runs(prompt)), "".join(self._decode_runs([*prompt, *output]))
        return (
            full_text[len(prompt_text) :] if full_text.startswith(prompt_text) else "".join(self._decode_runs(output))
        )

    def _decode_runs(self, ids: Sequence[int]) -> Iterator[str]:
        """Yield each run of ordinary ids as text, and each sentinel by name."""
        names = {}
        if self.t5_tokens is not None:
            names = {token: SENTINEL.format(idx) for idx, token in enumerate(self.t5_tokens.sentinels)}
        size = self.tokenizer.vocab_size
        for (is_sentinel, is_known), run in groupby(ids, lambda token: (token in names, token < size)):
            if is_sentinel:
                yield from (names[token] for token in run)
            else:
                run_ids = list(run)
                yield self.tokenizer.decode(run_ids) if is_known else UNKNOWN * len(run_ids)


def opening_ids(tokenizer: Tokenizer, adds_bos: bool | None) -> list[int]:
    """Return the ids before a decoder's prompt, with ``adds_bos`` as in ``Prompts``.

    Raises:
        DataError: ``adds_bos`` is True and the tokenizer has no bos_token.
    """
    if adds_bos is False:
        return []
    if tokenizer.opening_ids or adds_bos is None:
        return list(tokenizer.opening_ids)
    name = special_names(tokenizer).get("bos_token")
    token = None if name is None else tokenizer.token_to_id(name)
    if token is None:
        raise DataError(
            "--add-bos-token needs a tokenizer with a bos_token, got one without. Leave --add-bos-token out"
        )
    return [token]


class ChatPrompts(Prompts):
    """Prompts for conversations: renders texts as the user's turns and the model's outputs as the assistant's turns.

    Args:
        template: the template with its tokenizer.
        system: system message at the start of each conversation; None: no system message.

    Attributes:
        history: previous turns, added by ``remember``; empty if each text is a separate conversation.
    """

    def __init__(self, template: ChatTemplate, system: str | None = None) -> None:
        super().__init__(template.tokenizer, None)
        self.template = template
        self.opening_messages = [] if system is None else [{"role": "system", "content": system}]
        self.history: list[dict[str, str]] = []

    @property
    def eos_id(self) -> int | None:
        """The token with which the template ends the assistant's turn, otherwise the end-of-document token."""
        stop_id = self.template.stop_id
        return stop_id if stop_id is not None else super().eos_id

    def encode(self, text: str) -> list[int]:
        """Return the tokens of the conversation with ``text`` as the user's next turn, up to the assistant's turn.

        Raises:
            DataError: the template rejects the conversation.
        """
        return self.template.prompt_ids([*self.opening_messages, *self.history, _turn("user", text)])

    def remember(self, text: str, answer: str) -> None:
        """Append a turn of the user and the answer to the conversation."""
        self.history += [_turn("user", text), _turn(ASSISTANT, answer)]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def fill_gaps(text: str, spans: str) -> str:
    """Return ``text`` with T5's output for each sentinel in brackets, or [...] if there is none.

    Args:
        spans: T5's output: each sentinel followed by its span.
    """
    fields = _SENTINEL.split(spans)
    span_by_idx = dict(zip(fields[1::2], (span.strip() for span in fields[2::2]), strict=True))
    return re.sub(r"<extra_id_(\d+)>", lambda gap: f"[{span_by_idx.get(gap[1]) or '...'}]", text)


# Text generation over the replicas of a job.

OnText = Callable[[str], Any]


@dataclass(frozen=True)
class Answer:
    """The model's answer to a prompt.

    Args:
        text: generated text, without the prompt and the end token.
        tokens: generated tokens, including the end token.
        is_ended: the model ended the answer; otherwise the answer reached its maximum number of tokens.
    """

    prompt: str
    text: str
    tokens: list[int]
    num_prompt_tokens: int
    is_ended: bool


@dataclass(frozen=True)
class TextGenerator:
    """Answers prompts with a model.

    Args:
        stage: this rank's stage of the model.
        data: the replicas, among which prompts are distributed.
        batch_size: prompts per forward pass.
        max_new_tokens: maximum per answer; None: 64, or fewer if the learned positions do not suffice.
        sampling: None: choose the most likely token each time.
    """

    stage: ModelStage
    prompts: Prompts
    data: Group = SINGLE
    batch_size: int = 8
    max_new_tokens: int | None = None
    sampling: Sampling | None = None

    def answer(self, texts: Sequence[str], on_text: OnText | None = None) -> list[Answer]:
        """Return the answer to each of ``texts``, the same on every rank. Collective over all ranks.

        Answers do not depend on the layout or on the other texts. One exception: when sampling, equal texts get
        different random numbers.

        Args:
            on_text: called with each new part of the answer as it is generated; only for a single text.

        Raises:
            DataError: the model cannot process a text.
        """
        rows = self.encode(texts)
        keys = keys_of(rows)
        by_length = sorted(range(len(rows)), key=lambda idx: len(rows[idx]))
        local_indices = by_length[self.data.rank :: self.data.size]
        tokens_by_idx: dict[int, list[int]] = {}
        for first in range(0, len(local_indices), self.batch_size):
            batch = local_indices[first : first + self.batch_size]
            on_token = streaming(self.prompts, rows[batch[0]], on_text) if on_text is not None else None
            options = {"keys": [keys[idx] for idx in batch], "on_token": on_token}
            tokens_by_idx.update(zip(batch, self._generate([rows[idx] for idx in batch], **options), strict=True))
        answers = self.data.gather_objects(tokens_by_idx)
        tokens_by_idx = {idx: tokens for answers_of_rank in answers for idx, tokens in answers_of_rank.items()}
        return [
            self._make_answer(text, row, tokens_by_idx[idx])
            for idx, (text, row) in enumerate(zip(texts, rows, strict=True))
        ]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of all texts. Checking them together gives error messages the right prompt numbers.

        Raises:
            DataError: the model cannot process a text.
        """
        rows, args = [self.prompts.encode(text) for text in texts], self.stage.args
        if isinstance(args, T5ModelArgs):
            t5_limits(args, rows, self.max_new_tokens)
        else:
            gpt2_limits(args, rows, self.max_new_tokens)
        return rows

    def _generate(self, rows: list[list[int]], **kwargs: Any) -> list[list[int]]:
        prompts = self.prompts
        options = {"max_new_tokens": self.max_new_tokens, "eos_id": prompts.eos_id, "sampling": self.sampling, **kwargs}
        if prompts.t5_tokens is not None:
            return generate_t5(self.stage, rows, start_id=prompts.t5_tokens.start_id, **options)
        return generate_gpt2(self.stage, rows, **options)

    def _make_answer(self, text: str, row: list[int], tokens: list[int]) -> Answer:
        is_ended = tokens[-1] == self.prompts.eos_id
        return Answer(text, self.prompts.decode(tokens, prompt=row), tokens, len(row), is_ended)


def streaming(prompts: Prompts, row: list[int], on_text: OnText) -> Callable[[int, int], None]:
    """Return a callback for (row number, token) that passes generated text to ``on_text``.

    Only complete characters are passed on. ``row`` contains the tokens of the prompt.
    """
    tokens: list[int] = []
    shown = ""

    def on_token(_: int, token: int) -> None:
        nonlocal shown
        tokens.append(token)
        text = prompts.decode(tokens, prompt=row)
        if text.startswith(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            on_text(text[len(shown) :])
            shown = text

    return on_token


# Interactive generation: each line is a prompt, and its answer is streamed.

INPUT_POLL_S = 60.0
"""Interval at which rank 0 notifies waiting ranks: the user may take longer than ranks wait for each other."""


def interactive(writer: TextGenerator, world: Group) -> None:
    """Answer each line of standard input on standard output, until the input ends. Collective.

    Only rank 0 reads and writes. A line that cannot be answered is reported and skipped.
    """
    for line in _broadcast_lines(world):
        if not line.strip():
            continue
        try:
            _answer_line(writer, _decode_line(line), should_print=world.rank == 0)
        except DataError as error:  # raised on every rank, before any collective
            log.info(str(error))


def _decode_line(line: bytes) -> str:
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        raise DataError(f"a line must be UTF-8 text: {error}") from None


def _answer_line(writer: TextGenerator, text: str, *, should_print: bool) -> None:
    shown: list[str] = []

    def show(text_chunk: str) -> None:
        shown.append(text_chunk)
        if should_print:
            sys.stdout.write(text_chunk)
            sys.stdout.flush()

    (answer,) = writer.answer([text], show)
    if isinstance(writer.prompts, ChatPrompts):
        writer.prompts.remember(text, answer.text)
    if should_print:
        sys.stdout.write(answer.text.removeprefix("".join(shown)) + "\n")  # including incomplete characters
        sys.stdout.flush()


def _broadcast_lines(world: Group) -> Iterator[bytes]:
    """Yield the lines of rank 0's standard input on every rank."""
    input_lines: queue.Queue[bytes] = queue.Queue()
    if world.rank == 0:
        threading.Thread(target=_read_lines, args=(input_lines,), daemon=True).start()
    while True:
        line = _next_line(input_lines, world)
        if line == b"":
            return
        if line is not None:
            yield line


def _read_lines(input_lines: queue.Queue[bytes]) -> None:
    while True:
        line = sys.stdin.buffer.readline()
        input_lines.put(line)
        if line == b"":
            return


def _next_line(input_lines: queue.Queue[bytes], world: Group) -> bytes | None:
    """Return the next line, an empty one at the end of the input, or None if there was none within ``INPUT_POLL_S``."""
    line = None
    if world.rank == 0:
        with suppress(queue.Empty):
            line = input_lines.get(timeout=INPUT_POLL_S)
    return world.broadcast_object(line)
