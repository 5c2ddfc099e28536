"""Chat templates: a conversation to text and to token ids, and which tokens the assistant says."""

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

# Where a template is read from; the first source that exists is used:
#
# | source | content |
# |---|---|
# | --chat-template FILE | the template's text |
# | chat_template.jinja next to the tokenizer's file, with additional_chat_templates/NAME.jinja | "default", others |
# | tokenizer_config.json next to it | "chat_template": the text, or a list of named templates with a "default" |
#
# A conversation with tools is rendered by the template named "tool_use" if there is one, all others by "default", as
# `transformers.PreTrainedTokenizerBase.get_chat_template` chooses.
#
# It is rendered as `transformers` does: jinja2 in its sandbox, with `messages`, `tools`, `add_generation_prompt` and
# the names of control tokens (`bos_token`, `eos_token`, ...), with the tag `{% generation %}` and the functions
# `raise_exception` and `strftime_now`. Each conversation is encoded whole, and no token is added to it. A control token
# that a message spells becomes that token, as there.

TEMPLATE, SETTINGS, SPECIAL = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
NAMED = "additional_chat_templates"
"""Folder of further templates next to ``TEMPLATE``, each in a file NAME.jinja."""
DEFAULT, TOOL_USE = "default", "tool_use"
ASSISTANT = "assistant"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SPECIAL_NAMES = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that reasoning goes by in a message; templates read the first two."""

_SAMPLE_QUESTION, _SAMPLE_ANSWER = "plum", "melon"
_CONTROL_LIKE = re.compile(r"<[^\s<>]+>")
"""Text that templates use as control tokens, such as <|im_end|> or </s>."""

Message = Mapping[str, Any]
Span = tuple[int, int]


class TemplateError(DataError):
    """A template does not take a conversation; the text says why."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` puts marks around what is rendered in between.

    The marks are characters that no text may hold; ``_without_marks`` takes them out and says where they stood. So a
    block within a macro, a filter or a set block is found where its text ends up.
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
"""Template variable: for each message by its ``id``, whether its tokens have a loss. Set if some have none."""


def _block_has_loss(context: jinja2.runtime.Context, has_loss: Mapping[int, bool]) -> bool:
    """Return whether the message that a ``{% generation %}`` block renders has a loss.

    The message is the value of a variable that the block can see: the variable of the loop over the messages, or a
    parameter of a macro.
    """
    found = {has_loss[id(value)] for value in context.get_all().values() if id(value) in has_loss}
    if len(found) != 1:
        raise jinja2.exceptions.TemplateError(
            "a message without a loss (weight 0, loss false or train false) needs a template in which every "
            "{% generation %} block sees one message as a variable, such as that of the loop over the messages"
        )
    return found.pop()


_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode, "intended for process-internal uses" (The Unicode Standard, section 23.7)."""
_UNUSABLE = re.compile(f"[{_BEGIN}{_END}\ud800-\udfff]")
"""Characters that a conversation must not contain: the marks, and surrogates, which no encoding can represent."""


def _without_marks(text: str) -> tuple[str, list[Span]]:
    """Return ``text`` without marks, and where the marked parts lie in it."""
    parts, spans, length, begins = list[str](), list[Span](), 0, list[int]()
    for found in re.finditer(f"[^{_BEGIN}{_END}]+|{_BEGIN}|{_END}", text):
        part = found.group()
        if part == _BEGIN:
            begins.append(length)
        elif part == _END:
            spans.append((begins.pop(), length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), sorted(spans)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter ``tojson`` without jinja's escapes for HTML."""
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
            f"the chat template must be one that jinja2 reads, got {source}, line {error.lineno}: {error.message}. "
            "Correct it, or name another with --chat-template"
        ) from error


@dataclass(frozen=True)
class Encoded:
    """A conversation as tokens: ``ids``, and for each whether the assistant says it."""

    ids: list[int]
    is_said: list[bool]


class ChatTemplate:
    """A chat template with its tokenizer.

    Args:
        text: of the default template.
        source: the file that it came from, for messages.
        special: names of control tokens as the template calls them, "eos_token" and the like.
        named: texts of further templates by name. "tool_use" renders conversations with tools.

    Raises:
        DataError: jinja2 cannot read the text, or the tokenizer does not tell where its tokens lie in a text.
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
                f"merges.txt), got {type(tokenizer).__name__}. Name such a one with --tokenizer-path"
            )
        self.text, self.tokenizer, self.source, self.special = text, tokenizer, source, dict(special)
        self.named = dict(named or {})
        used = {DEFAULT: text} | {name: text for name, text in self.named.items() if name == TOOL_USE}
        self._templates = {DEFAULT: _compiled(text, source)}  # "tool_use" when the first conversation needs it
        self._marks_generation = {name: _GENERATION.search(text) is not None for name, text in used.items()}
        self._texts = "\n".join(used.values())

    @property
    def key(self) -> str:
        """A text that changes with all that changes what is rendered; fingerprints hold it, so it never changes."""
        named = json.dumps([self.text, self.special], sort_keys=True)
        return hashlib.sha256(named.encode()).hexdigest()[:16]

    @property
    def tools_key(self) -> str:
        """A text that changes with the rendering of conversations with tools; empty without a "tool_use" template."""
        text = self.named.get(TOOL_USE)
        return "" if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]

    def reads(self, name: str) -> bool:
        """Return whether a template's text mentions ``name``, a variable or a key of a message."""
        names = _REASONING if name in _REASONING else (name,)
        return any(re.search(rf"\b{re.escape(name)}\b", self._texts) for name in names)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, knows_date: bool = False,
        tools: Any = None, **more: Any,
    ) -> str:  # fmt: skip
        """Return the text of a conversation.

        Args:
            add_generation_prompt: open the assistant's next turn.
            knows_date: give the template ``strftime_now``; without it the same conversation is the same text each day.
            more: further variables of the template, such as ``enable_thinking``.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        return self._rendered(messages, add_generation_prompt, knows_date, {"tools": tools, **more})[0]

    def encode(self, messages: Sequence[Message], *, without_loss: Collection[int] = (), **more: Any) -> Encoded:
        """Return the tokens of a whole conversation, and which the assistant says.

        With ``{% generation %}`` in the template these are the tokens that the blocks overlap. Without it they are, for
        each turn of the assistant, what ``messages`` up to and with that turn have behind the generation prompt of
        those ahead of it; white space behind the last control token of a turn is nobody's.

        Args:
            without_loss: indices of messages whose tokens have no loss.
            more: further variables of the template, such as ``tools``.

        Raises:
            TemplateError: the template refuses it, or the prefixes of the conversation are not prefixes of its text.
        """
        text, spans = self._rendered(messages, False, False, more, without_loss)
        if not self._marks_generation[self._name_for(more)]:
            spans = self._spans_by_prefixes(messages, text, more, without_loss)
        ids, offsets = self.tokenizer.encode_rendered(text)
        return Encoded(ids, _overlap(offsets, spans))

    def prompt_ids(self, messages: Sequence[Message], **more: Any) -> list[int]:
        """Return the tokens after which the assistant speaks.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        text = self.render(messages, add_generation_prompt=True, knows_date=True, **more)
        return self.tokenizer.encode_rendered(text)[0]

    @cached_property
    def stop_id(self) -> int | None:
        """The token that ends a turn of the assistant: the first control token behind what it says; None: none does."""
        text, end = self._sample_turn()
        control = set(self.tokenizer.control_tokens.values())
        ids, offsets = self.tokenizer.encode_rendered(text)
        behind = [token for token, (start, _) in zip(ids, offsets, strict=True) if start >= end and token in control]
        return behind[0] if behind else None

    @property
    def end_of_turn_problem(self) -> str | None:
        """Why nothing marks the end of an answer, with the fix; None if a control token ends the assistant's turns.

        A model that is fine-tuned with such a template writes on after its answer, here and in other programs.
        """
        try:
            if self.stop_id is not None:
                return None
        except TemplateError:  # the template rejects a question with its answer: the data report it
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
        """Return the text of a question with its answer, and the index after the answer."""
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
        given: dict[str, Any] = {"tools": None, "documents": None, **self.special, **more}
        if knows_date:
            given["strftime_now"] = lambda form: datetime.now().strftime(form)
        own = [_with_reasoning(message) for message in messages]
        if without_loss:
            given[_HAS_LOSS] = {id(message): idx not in without_loss for idx, message in enumerate(own)}
        try:
            if unusable := _UNUSABLE.search(json.dumps([own, more], ensure_ascii=False, default=str)):
                raise TemplateError(
                    f"a conversation must not contain U+{ord(unusable.group()):04X}, which is no character "
                    "(a lone surrogate, or reserved for internal use). Remove it"
                )
            text = self._template(self._name_for(more)).render(
                messages=own, add_generation_prompt=add_generation_prompt, **given
            )
        except DataError:
            raise
        except RecursionError:
            raise TemplateError("a conversation must not be nested so deeply. Flatten it, or remove it") from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise TemplateError(f"the chat template ({self.source}) refuses it: {error}") from error
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
        for place, message in enumerate(messages):
            if message["role"] != ASSISTANT or place in without_loss:
                continue
            ahead = self._rendered(messages[:place], True, False, more)[0] if place else ""
            through = self._rendered(messages[: place + 1], False, False, more)[0]
            if not through.startswith(ahead) or not text.startswith(through):
                raise TemplateError(
                    f"the template ({self.source}) must render a conversation up to message {place + 1} as the "
                    "beginning of the whole, since it does not mark what the assistant says, got another text "
                    f"({_difference(ahead, through) if not through.startswith(ahead) else _difference(through, text)})."
                    " Put {% generation %} and {% endgeneration %} around what the assistant says in a copy of the "
                    "template, and give it as --chat-template FILE"
                )
            spans.append((len(ahead), len(ahead) + len(self._said(through[len(ahead) :]))))
        return spans

    def _said(self, turn: str) -> str:
        """Return a turn without the white space behind its last control token."""
        kept = turn.rstrip()
        ends = any(kept.endswith(name) for name in self.tokenizer.control_tokens)
        return kept if ends else turn


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Return ``message`` without what is None, and its reasoning under each name that templates read."""
    own = {name: value for name, value in message.items() if value is not None}
    found = next((own[name] for name in _REASONING if name in own), None)
    return own if found is None else {"thinking": found, **own, "reasoning_content": found}


def _overlap(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Return for each token whether it overlaps one of ``spans``; both are in order."""
    result, at = [], 0
    for start, end in offsets:
        while at < len(spans) and start >= spans[at][1]:
            at += 1
        result.append(at < len(spans) and end > spans[at][0])
    return result


def _difference(short: str, long: str) -> str:
    place = next((at for at, pair in enumerate(zip(short, long, strict=False)) if pair[0] != pair[1]), len(long))
    return f"from character {place} on {short[place : place + 20]!r}, and then {long[place : place + 20]!r}"


# From files to a template.


def find_template(tokenizer: Tokenizer, given: str | Path | None = None) -> ChatTemplate:
    """Return the chat template of ``tokenizer``, or the one in the file ``given``: the table at the top of this file.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    special = special_names(tokenizer)
    if given is not None:
        return ChatTemplate(_read(Path(given)), tokenizer, source=str(given), special=special)
    folder = tokenizer.paths[0].parent if tokenizer.paths else None
    source, texts = _templates_in(folder) if folder else (SETTINGS, {})
    if DEFAULT not in texts:
        others = f" (there are {', '.join(map(repr, sorted(texts)))})" if texts else ""
        raise DataError(
            f"a conversation needs a chat template, got none next to the tokenizer ({folder}: {TEMPLATE}, or "
            f'"chat_template" in {SETTINGS}, as a text or with the name "{DEFAULT}"{others}). '
            "Name a file with --chat-template"
        )
    text = texts.pop(DEFAULT)
    return ChatTemplate(text, tokenizer, source=source, special=special, named=texts)


def _templates_in(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the file that messages name, and the templates of a tokenizer's folder by name."""
    files = {DEFAULT: folder / TEMPLATE} if (folder / TEMPLATE).is_file() else {}
    files.update((path.stem, path) for path in sorted((folder / NAMED).glob("*.jinja")))
    if files:
        return str(next(iter(files.values()))), {name: _read(path) for name, path in files.items()}
    found = read_object(folder / SETTINGS).get("chat_template")
    listed = found if isinstance(found, list) else [{"name": DEFAULT, "template": found}]
    texts = {one.get("name"): one.get("template") for one in listed if isinstance(one, dict)}
    return str(folder / SETTINGS), {
        name: text for name, text in texts.items() if isinstance(name, str) and isinstance(text, str)
    }


def special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the names of control tokens as templates call them: those of the tokenizer's folder, else its own.

    As in transformers, special_tokens_map.json overrides tokenizer_config.json, unless the latter is complete, which
    its "added_tokens_decoder" shows.
    """
    folder = tokenizer.paths[0].parent if tokenizer.paths else None
    settings = read_object(folder / SETTINGS) if folder else {}
    is_complete = "added_tokens_decoder" in settings
    found: dict[str, str] = {}
    for content in (settings, read_object(folder / SPECIAL) if folder and not is_complete else {}):
        for kind in _SPECIAL_NAMES:
            token = content.get(kind)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[kind] = token
    if found:
        return found
    by_id: dict[int | None, str] = {token: name for name, token in reversed(tokenizer.control_tokens.items())}
    eod = tokenizer.eod_name
    own = {"bos_token": eod, "eos_token": eod, "pad_token": by_id.get(tokenizer.pad_id)}
    own["unk_token"] = by_id.get(tokenizer.unk_id)
    return {kind: name for kind, name in own.items() if name is not None}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--chat-template {path} must be a text that can be read: {error}") from error
