"""Chat templates: render and encode a conversation, and locate the assistant's tokens."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from megatron.errors import DataError
from megatron.tokenizer.huggingface import LibraryTokenizer
from megatron.tokenizer.sibling_files import read_object
from megatron.tokenizer.tokenizer import Tokenizer

# Sources of a template; the first existing source is used:
#
# | source | content |
# |---|---|
# | --chat-template FILE | the template's text |
# | chat_template.jinja next to the tokenizer's file, with additional_chat_templates/NAME.jinja | "default"; NAME |
# | tokenizer_config.json next to it | "chat_template": the text, or a list of named templates with a "default" |
#
# A conversation with tools is rendered by the template "tool_use" if it exists, and other conversations by "default",
# as in `transformers.PreTrainedTokenizerBase.get_chat_template`.
#
# Rendering follows `transformers`: sandboxed jinja2 with the variables `messages`, `tools`, `add_generation_prompt` and
# the names of control tokens (`bos_token`, `eos_token`, ...), the tag `{% generation %}`, and the functions
# `raise_exception` and `strftime_now`. Each conversation is encoded as a whole, without added tokens. As in
# `transformers`, the spelling of a control token in a message is encoded as the control token.

TEMPLATE, SETTINGS, SPECIAL = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
NAMED = "additional_chat_templates"
"""Folder next to ``TEMPLATE`` with additional templates in files NAME.jinja."""
DEFAULT, TOOL_USE = "default", "tool_use"
ASSISTANT = "assistant"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SPECIAL_NAMES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of the reasoning in a message; templates read the first two."""

_SAMPLE_QUESTION, _SAMPLE_ANSWER = "plum", "melon"
_CONTROL_LIKE = re.compile(r"<[^\s<>]+>")
"""Pattern of texts that templates use as control tokens, such as <|im_end|> or </s>."""

Message = Mapping[str, Any]
Span = tuple[int, int]


class TemplateError(DataError):
    """A template rejects a conversation; the message has the reason."""


class _Generation(jinja2.ext.Extension):
    """The block ``{% generation %} ... {% endgeneration %}``, which puts marks around its rendered content.

    The marks are characters that texts must not contain. ``_without_marks`` removes them and returns their positions.
    Blocks within a macro, a filter or a set block are therefore located in the final text.
    """

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked", [jinja2.nodes.DerivedContextReference()])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, context: jinja2.runtime.Context, caller: Callable[[], str]) -> str:
        has_loss = context.get(_HAS_LOSS)
        if has_loss is not None and not _block_has_loss(context, has_loss):
            return caller()
        return f"{_BEGIN}{caller()}{_END}"


_HAS_LOSS = "_megatron_has_loss"
"""Template variable: ``id(message)`` -> True if the message has a loss. Only set if some messages have no loss."""


def _block_has_loss(context: jinja2.runtime.Context, has_loss: Mapping[int, bool]) -> bool:
    """Return True if the message that a ``{% generation %}`` block renders has a loss.

    The message is a variable in the block's scope: the loop variable over the messages, or a macro parameter.
    """
    values = {has_loss[id(value)] for value in context.get_all().values() if id(value) in has_loss}
    if len(values) != 1:
        raise jinja2.exceptions.TemplateError(
            "a message without a loss (weight 0, loss false or train false) requires a template in which exactly one "
            "message is visible as a variable in every {% generation %} block, such as the variable of the message loop"
        )
    return values.pop()


_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode, "intended for process-internal uses" (The Unicode Standard, section 23.7)."""
_UNUSABLE = re.compile(f"[{_BEGIN}{_END}\ud800-\udfff]")
"""Characters that a conversation must not contain: the marks, and surrogates, which no encoding can represent."""


def _without_marks(text: str) -> tuple[str, list[Span]]:
    """Remove the marks from ``text``; also return the marked spans."""
    segments, spans, length, starts = list[str](), list[Span](), 0, list[int]()
    for match in re.finditer(f"[^{_BEGIN}{_END}]+|{_BEGIN}|{_END}", text):
        segment = match.group()
        if segment == _BEGIN:
            starts.append(length)
        elif segment == _END:
            spans.append((starts.pop(), length))
        else:
            segments.append(segment)
            length += len(segment)
    return "".join(segments), sorted(spans)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter ``tojson`` without jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _compiled(text: str, source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            f"jinja2 cannot parse the chat template {source}, line {error.lineno}: {error.message}. "
            "Correct it, or name another one with --chat-template"
        ) from error


@dataclass(frozen=True)
class Encoded:
    """A conversation's token ids; ``has_loss`` is True for assistant tokens with a loss."""

    ids: list[int]
    has_loss: list[bool]


class ChatTemplate:
    """A chat template with its tokenizer.

    Args:
        text: text for the default template.
        source: template file, for messages.
        special: template variable -> control token, such as "eos_token" -> "</s>".
        named: additional template texts by name; "tool_use" renders conversations with tools.

    Raises:
        DataError: jinja2 cannot parse the text, or the tokenizer cannot return token positions in a text.
    """

    def __init__(
        self,
        text: str,
        tokenizer: Tokenizer,
        *,
        source: str,
        special: Mapping[str, str],
        named: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(tokenizer, LibraryTokenizer):
            raise DataError(
                "a chat template needs a tokenizer of the `tokenizers` library (tokenizer.json, or vocab.json with "
                f"merges.txt), got {type(tokenizer).__name__}. Name one with --tokenizer-path"
            )
        self.text, self.tokenizer, self.source, self.special = text, tokenizer, source, dict(special)
        self.named = dict(named or {})
        used_texts = {DEFAULT: text} | {name: text for name, text in self.named.items() if name == TOOL_USE}
        self._templates = {DEFAULT: _compiled(text, source)}  # "tool_use" is compiled on first use
        self._marks_generation = {name: _GENERATION.search(text) is not None for name, text in used_texts.items()}
        self._texts = "\n".join(used_texts.values())

    @property
    def key(self) -> str:
        """Digest of everything that affects the rendered text. Fingerprints contain it, so it must never change."""
        content = json.dumps([self.text, self.special], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def tools_key(self) -> str:
        """Digest of the "tool_use" template, which renders conversations with tools; empty without that template."""
        text = self.named.get(TOOL_USE)
        return "" if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]

    def mentions(self, name: str) -> bool:
        """Return True if a template mentions ``name``, a variable or a message key."""
        names = _REASONING if name in _REASONING else (name,)
        return any(re.search(rf"\b{re.escape(name)}\b", self._texts) for name in names)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, knows_date: bool = False,
        tools: Any = None, **more: Any,
    ) -> str:  # fmt: skip
        """Render a conversation as text.

        Args:
            add_generation_prompt: append the start of the assistant's next turn.
            knows_date: define ``strftime_now``; without it, a conversation has the same text on every day.
            more: additional template variables, such as ``enable_thinking``.

        Raises:
            TemplateError: the template rejects the conversation.
        """
        return self._rendered(messages, add_generation_prompt, knows_date, {"tools": tools, **more})[0]

    def encode(self, messages: Sequence[Message], *, without_loss: Collection[int] = (), **more: Any) -> Encoded:
        """Encode a complete conversation, and mark the assistant's tokens.

        If the template has ``{% generation %}`` blocks, tokens that overlap the blocks belong to the assistant.
        Otherwise, each assistant turn is located by two renderings. The first contains the messages before the turn,
        followed by the generation prompt. The second contains the messages up to and including the turn. The text that
        the second rendering appends to the first belongs to the assistant, except white space after the turn's last
        control token.

        Args:
            without_loss: indices of messages without a loss.
            more: additional template variables, such as ``tools``.

        Raises:
            TemplateError: the template rejects the conversation, or it renders the first messages to a text that is not
                a prefix of the complete text.
        """
        text, spans = self._rendered(messages, False, False, more, without_loss)
        if not self._marks_generation[self._name_for(more)]:
            spans = self._spans_by_prefixes(messages, text, more, without_loss)
        ids, offsets = self.tokenizer.encode_rendered(text)
        return Encoded(ids, _overlap(offsets, spans))

    def prompt_ids(self, messages: Sequence[Message], **more: Any) -> list[int]:
        """Encode a conversation, followed by the generation prompt.

        Raises:
            TemplateError: the template rejects the conversation.
        """
        text = self.render(messages, add_generation_prompt=True, knows_date=True, **more)
        return self.tokenizer.encode_rendered(text)[0]

    @cached_property
    def stop_id(self) -> int | None:
        """The token that ends an assistant turn: the first control token after the text, or None."""
        text, end = self._sample_turn()
        control = set(self.tokenizer.control_tokens.values())
        ids, offsets = self.tokenizer.encode_rendered(text)
        end_tokens = [
            token for token, (start, _) in zip(ids, offsets, strict=True) if start >= end and token in control
        ]
        return end_tokens[0] if end_tokens else None

    @property
    def end_of_turn_problem(self) -> str | None:
        """The reason why no control token ends the assistant's turns, with a fix; None if a token does.

        A model that is fine-tuned without such a token does not stop after its answer, in any program.
        """
        try:
            if self.stop_id is not None:
                return None
        except TemplateError:  # reported when the data are rendered
            return None
        text, end = self._sample_turn()
        closing = text[end:].strip()
        if not closing:
            return (
                f"the chat template ({self.source}) renders no token after the assistant's answer, so that --chat "
                "cannot detect where an answer ends. Add {{ eos_token }} after it in a copy of the template, and name "
                "the copy with --chat-template"
            )
        frame = text.replace(_SAMPLE_QUESTION, " ").replace(_SAMPLE_ANSWER, " ")
        names = [*_CONTROL_LIKE.findall(frame), *closing.split()[:1]]
        names = [name for name in dict.fromkeys(names) if name not in self.tokenizer.control_tokens]
        count = len(self.tokenizer.encode_rendered(closing)[0])
        return (
            f"the chat template ({self.source}) ends a turn with {closing!r}, which is {count} ordinary "
            f"token{'s' if count > 1 else ''} of the tokenizer ({', '.join(map(str, self.tokenizer.paths))}), so that "
            "--chat cannot detect where an answer ends. Use a template whose turns end with a control token of the "
            "tokenizer, or train the tokenizer with these names before pretraining: tools/train_tokenizer.py "
            f"--special-tokens {' '.join(map(shlex.quote, names))}"
        )

    def _sample_turn(self) -> tuple[str, int]:
        """Render a sample question and answer; return the text and the index after the answer."""
        messages = [{"role": "user", "content": _SAMPLE_QUESTION}, {"role": ASSISTANT, "content": _SAMPLE_ANSWER}]
        text = self.render(messages)
        return text, text.rfind(_SAMPLE_ANSWER) + len(_SAMPLE_ANSWER)

    def _rendered(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        knows_date: bool,
        more: Mapping[str, Any],
        without_loss: Collection[int] = (),
    ) -> tuple[str, list[Span]]:
        variables: dict[str, Any] = {"tools": None, "documents": None, **self.special, **more}
        if knows_date:
            variables["strftime_now"] = lambda form: datetime.now().strftime(form)
        cleaned = [_with_reasoning(message) for message in messages]
        if without_loss:
            variables[_HAS_LOSS] = {id(message): idx not in without_loss for idx, message in enumerate(cleaned)}
        try:
            if unusable := _UNUSABLE.search(json.dumps([cleaned, more], ensure_ascii=False, default=str)):
                raise TemplateError(
                    f"a conversation must not contain U+{ord(unusable.group()):04X}, which is not a character "
                    "(a lone surrogate, or reserved for internal use). Remove it"
                )
            text = self._template(self._name_for(more)).render(
                messages=cleaned, add_generation_prompt=add_generation_prompt, **variables
            )
        except DataError:
            raise
        except RecursionError:
            raise TemplateError("the conversation is nested too deeply. Flatten or remove it") from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise TemplateError(f"the chat template ({self.source}) rejects the conversation: {error}") from error
        return _without_marks(text)

    def _name_for(self, more: Mapping[str, Any]) -> str:
        """Return the name of the template that renders a conversation with the variables ``more``."""
        return TOOL_USE if more.get("tools") is not None and TOOL_USE in self.named else DEFAULT

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._templates:
            self._templates[name] = _compiled(self.named[name], f"{self.source}, {name}")
        return self._templates[name]

    def _spans_by_prefixes(
        self, messages: Sequence[Message], text: str, more: Mapping[str, Any], without_loss: Collection[int]
    ) -> list[Span]:
        spans = []
        for idx, message in enumerate(messages):
            if message["role"] != ASSISTANT or idx in without_loss:
                continue
            prompt = self._rendered(messages[:idx], True, False, more)[0] if idx else ""
            prefix = self._rendered(messages[: idx + 1], False, False, more)[0]
            if not prefix.startswith(prompt) or not text.startswith(prefix):
                raise TemplateError(
                    f"the chat template ({self.source}) does not mark the assistant's text, so it must render the "
                    f"messages up to message {idx + 1} as a prefix of the full conversation, got another text "
                    f"({_difference(prompt, prefix) if not prefix.startswith(prompt) else _difference(prefix, text)})."
                    " Put {% generation %} and {% endgeneration %} around the assistant's text in a copy of the "
                    "template, and name the copy with --chat-template FILE"
                )
            spans.append((len(prompt), len(prompt) + len(self._without_trailing_space(prefix[len(prompt) :]))))
        return spans

    def _without_trailing_space(self, turn: str) -> str:
        """Remove white space after a turn's last control token."""
        stripped = turn.rstrip()
        ends_with_control = any(stripped.endswith(name) for name in self.tokenizer.control_tokens)
        return stripped if ends_with_control else turn


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Copy ``message`` without None values, with the reasoning under each key that templates read."""
    cleaned = {name: value for name, value in message.items() if value is not None}
    reasoning = next((cleaned[name] for name in _REASONING if name in cleaned), None)
    return cleaned if reasoning is None else {"thinking": reasoning, **cleaned, "reasoning_content": reasoning}


def _overlap(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Mark each token that overlaps a span; both arguments must be in ascending order."""
    result, span_idx = [], 0
    for start, end in offsets:
        while span_idx < len(spans) and start >= spans[span_idx][1]:
            span_idx += 1
        result.append(span_idx < len(spans) and end > spans[span_idx][0])
    return result


def _difference(short: str, long: str) -> str:
    start = next((idx for idx, pair in enumerate(zip(short, long, strict=False)) if pair[0] != pair[1]), len(long))
    return f"from character {start} on, {long[start : start + 20]!r} instead of {short[start : start + 20]!r}"


# Locate and read templates.


def find_template(tokenizer: Tokenizer, template_file: str | Path | None = None) -> ChatTemplate:
    """Load ``template_file``, or without it the tokenizer's chat template; see the table at the top of this file.

    Raises:
        DataError: there is no template, or it cannot be read.
    """
    special = special_names(tokenizer)
    if template_file is not None:
        return ChatTemplate(_read(Path(template_file)), tokenizer, source=str(template_file), special=special)
    folder = tokenizer.paths[0].parent if tokenizer.paths else None
    source, texts = _templates_in(folder) if folder else (SETTINGS, {})
    if DEFAULT not in texts:
        others = f" (there are {', '.join(map(repr, sorted(texts)))})" if texts else ""
        raise DataError(
            f"a conversation requires a chat template, got none next to the tokenizer ({folder}: {TEMPLATE}, or "
            f'"chat_template" in {SETTINGS}, as a text or with the name "{DEFAULT}"{others}). '
            "Name a file with --chat-template"
        )
    text = texts.pop(DEFAULT)
    return ChatTemplate(text, tokenizer, source=source, special=special, named=texts)


def _templates_in(folder: Path) -> tuple[str, dict[str, str]]:
    """Read a tokenizer's folder; return (file to name in messages, template name -> text)."""
    files = {DEFAULT: folder / TEMPLATE} if (folder / TEMPLATE).is_file() else {}
    files.update((path.stem, path) for path in sorted((folder / NAMED).glob("*.jinja")))
    if files:
        return str(next(iter(files.values()))), {name: _read(path) for name, path in files.items()}
    setting = read_object(folder / SETTINGS).get("chat_template")
    entries = setting if isinstance(setting, list) else [{"name": DEFAULT, "template": setting}]
    texts = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    return str(folder / SETTINGS), {
        name: text for name, text in texts.items() if isinstance(name, str) and isinstance(text, str)
    }


def special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """Map template variables to control tokens, from the tokenizer's folder if possible, otherwise from the tokenizer.

    As in transformers, special_tokens_map.json overrides tokenizer_config.json. It is ignored if tokenizer_config.json
    has an "added_tokens_decoder" and is therefore complete.
    """
    folder = tokenizer.paths[0].parent if tokenizer.paths else None
    settings = read_object(folder / SETTINGS) if folder else {}
    is_complete = "added_tokens_decoder" in settings
    names: dict[str, str] = {}
    for content in (settings, read_object(folder / SPECIAL) if folder and not is_complete else {}):
        for variable in _SPECIAL_NAMES:
            token = content.get(variable)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                names[variable] = token
    if names:
        return names
    by_id: dict[int | None, str] = {token: name for name, token in reversed(tokenizer.control_tokens.items())}
    eod = tokenizer.eod_name
    defaults = {"bos_token": eod, "eos_token": eod, "pad_token": by_id.get(tokenizer.pad_id)}
    defaults["unk_token"] = by_id.get(tokenizer.unk_id)
    return {variable: name for variable, name in defaults.items() if name is not None}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--chat-template {path} must be a readable text file: {error}") from error
