"""Conversations for supervised fine-tuning: record formats and JSON record files."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import zstandard

from megatron.data.preprocess import arrow_files
from megatron.errors import DataError
from megatron.tokenizer.chat import ASSISTANT

# Record formats:
#
# | record | format |
# |---|---|
# | {"messages": [{"role": "user", "content": "..."}, ...]} | OpenAI, TRL |
# | {"conversations": [{"from": "human", "value": "..."}, ...]} | ShareGPT |
# | {"instruction": "...", "input": "...", "output": "..."} | Alpaca; a question and its answer |
#
# | further record keys | effect |
# |---|---|
# | "system" | a system message before the other messages; null and "": no message |
# | "tools" | a list of objects, or the list as JSON text, for the template; null, "" and []: no tools |
# | "chat_template_kwargs" | additional template variables |
# | "history" (Alpaca) | earlier turns, [[question, answer], ...] |
#
# | message keys | effect |
# |---|---|
# | "weight" (OpenAI), "loss" (ms-swift), "train" (Axolotl) | 0 or false: no loss on this message of the assistant |
# | other keys | passed to the template |

ROLES = {"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}
"""Speaker names in ShareGPT's format, including the standard role names."""
_LOSS_KEYS = ("weight", "loss", "train")
_FORMAT_KEYS = {
    "messages": {"messages"},
    "conversations": {"conversations"},
    "instruction": {"instruction", "input", "output", "history"},
}
"""Identifying key of a format -> all keys of the format."""
_COMMON_KEYS = {"system", "tools", "chat_template_kwargs"}
_RESERVED_VARIABLES = {"messages", "add_generation_prompt", "without_loss", "self"}
"""Template variables and render arguments that a record must not set."""
_MAX_PREVIEW_CHARS = 60


@dataclass(frozen=True)
class Conversation:
    """A parsed record.

    Args:
        messages: messages that are passed to the template.
        template_variables: additional template variables.
        without_loss: indices of assistant messages whose tokens have no loss.
        unused_keys: record keys that have no effect.
        template_keys: record key, such as "messages[].name" -> its name in the template; the key has no effect
            if the template does not read it.
        differs_from_v1: releases before 2026-12 rendered this record differently, or computed the loss on other tokens.
    """

    messages: list[dict[str, Any]]
    template_variables: dict[str, Any]
    without_loss: frozenset[int] = frozenset()
    unused_keys: frozenset[str] = frozenset()
    template_keys: Mapping[str, str] = field(default_factory=dict)
    differs_from_v1: bool = False


def parse_record(data: bytes) -> Conversation:
    """Parse a JSON record into a conversation.

    Raises:
        ValueError: the record is not a conversation; the message names the problem and the fix.
    """
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"a line must be a JSON object in UTF-8, got {_preview(data)}: {error}. Correct it") from None
    except RecursionError:
        raise ValueError(f"a line is nested too deeply: {_preview(data)}. Remove it") from None
    key = next((name for name in _FORMAT_KEYS if name in content), None) if isinstance(content, dict) else None
    if key is None:
        description = (
            f"one with {', '.join(map(repr, content)) or 'nothing'}" if isinstance(content, dict) else _preview(data)
        )
        raise ValueError(
            'a line must be an object with "messages" (or "conversations", or "instruction" and "output"), '
            f"got {description}. Rename the field"
        )
    messages, template_keys, unused_keys = (
        _parse_alpaca(content) if key == "instruction" else _parse_messages(content[key], key)
    )
    system, is_system_new = _parse_system(content, key, messages)
    messages = [*system, *messages]
    if not any(message["role"] == ASSISTANT for message in messages):
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f'a conversation must have a message with the role "assistant", got {roles}. Remove the line')
    without_loss = frozenset(
        idx for idx, message in enumerate(messages) if not _has_loss(message, idx + 1 - len(system), unused_keys)
    )
    variables = _parse_template_variables(content)
    known_keys = _FORMAT_KEYS[key] | _COMMON_KEYS
    unused_keys |= {name for name, value in content.items() if name not in known_keys and value is not None}
    return Conversation(
        [{name: value for name, value in message.items() if name not in _LOSS_KEYS} for message in messages],
        variables,
        without_loss,
        frozenset(unused_keys),
        template_keys | {name: name for name in variables},
        bool(without_loss) or is_system_new or isinstance(content.get("tools"), str),
    )


def _parse_messages(raw_messages: Any, name: str) -> tuple[list[dict[str, Any]], dict[str, str], set[str]]:
    """Parse a message list into (messages, keys passed to the template, unread keys)."""
    if not isinstance(raw_messages, list) or not raw_messages:
        raise ValueError(f'"{name}" must be a list of at least one message, got {_preview(raw_messages)}. Correct it')
    messages, template_keys, unused_keys = list[dict[str, Any]](), dict[str, str](), set[str]()
    for message_number, message in enumerate(raw_messages, 1):
        is_sharegpt = isinstance(message, dict) and "from" in message and "role" not in message
        messages.append(
            _convert_sharegpt(message, message_number) if is_sharegpt else _check_message(message, message_number)
        )
        for key in (key for key, value in message.items() if value is not None and key not in _LOSS_KEYS):
            if is_sharegpt and key not in ("from", "value"):
                unused_keys.add(f"{name}[].{key}")
            elif not is_sharegpt and key not in ("role", "content"):
                template_keys[f"{name}[].{key}"] = key
    return messages, template_keys, unused_keys


def _convert_sharegpt(message: Mapping[str, Any], message_number: int) -> dict[str, Any]:
    """Convert message ``message_number`` (from 1) from ShareGPT's to OpenAI's format."""
    role = ROLES.get(message["from"]) if isinstance(message["from"], str) else None
    if role is None or not isinstance(message.get("value"), str):
        raise ValueError(
            f'message {message_number} must be {{"from": {" or ".join(ROLES)}, "value": a string}}, got '
            f'{_preview(message)}. Correct it, or write it as {{"role": ..., "content": ...}}'
        )
    loss_keys = {name: message[name] for name in _LOSS_KEYS if name in message}
    return {"role": role, "content": message["value"], **loss_keys}


def _check_message(message: Any, message_number: int) -> dict[str, Any]:
    """Return ``message`` if it has OpenAI's format, otherwise raise ValueError; ``message_number`` counts from 1."""
    if isinstance(message, dict) and isinstance(message.get("content"), list):
        raise ValueError(
            f'message {message_number}: "content" must be a string, got a list of parts, '
            f"{_preview(message['content'])}. Join "
            "the text parts into one string; images and other parts are not supported"
        )
    is_text = isinstance(message, dict) and isinstance(message.get("content"), str)
    has_calls = isinstance(message, dict) and message.get("content") is None and bool(message.get("tool_calls"))
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not (is_text or has_calls):
        raise ValueError(
            f'message {message_number} must be {{"role": a string, "content": a string}}, got {_preview(message)}. '
            "Correct it"
        )
    return message


def _parse_alpaca(content: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, str], set[str]]:
    """Parse a record in Alpaca's format; the input follows the instruction on a new line.

    Source: Taori et al. 2023, "Stanford Alpaca", alpaca_data.json; "history" as in LLaMA-Factory.
    """
    texts = [content.get(name) for name in ("instruction", "input", "output")]
    instruction, input_text, output = texts
    if not isinstance(instruction, str) or not isinstance(output, str) or not isinstance(input_text, str | None):
        raise ValueError(
            'a line with "instruction" must have the strings "instruction" and "output", and optionally the string '
            f'"input", got {_preview(texts)}. Correct it'
        )
    history = content.get("history") or []
    is_paired = isinstance(history, list) and all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn) for turn in history
    )
    if not is_paired:
        raise ValueError(f'"history" must be a list of [question, answer], got {_preview(history)}. Correct it')
    question = f"{instruction}\n{input_text}" if input_text else instruction
    pairs = [*history, [question, output]]
    roles = ("user", ASSISTANT)
    messages = [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]
    return messages, {}, set()


def _parse_system(
    content: Mapping[str, Any], format_key: str, messages: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], bool]:
    """Parse "system" into ([message to prepend] or [], True if earlier releases handled the record differently)."""
    system = content.get("system")
    if not isinstance(system, str | None):
        raise ValueError(f'"system" must be a string, got {_preview(system)}. Correct it')
    if not system:
        return [], system is not None and format_key == "conversations"
    if messages[0]["role"] == "system":
        if messages[0]["content"] == system:
            return [], format_key == "conversations"
        raise ValueError(
            f'"system" ({_preview(system)}) and the first message with the role "system" '
            f"({_preview(messages[0]['content'])}) differ. Keep one of them"
        )
    return [{"role": "system", "content": system}], format_key != "conversations"


def _has_loss(message: Mapping[str, Any], message_number: int, unused_keys: set[str]) -> bool:
    """Check if the message's tokens have a loss; add keys without effect to ``unused_keys``."""
    flags = {name: message[name] for name in _LOSS_KEYS if message.get(name) is not None}
    for name, value in flags.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise ValueError(
                f'message {message_number}: "{name}" must be 0 or 1 (false or true), got {_preview(value)}. Correct '
                "it, or "
                "remove it"
            )
        if value and message["role"] != ASSISTANT:
            if name == "train":
                raise ValueError(
                    f'message {message_number} must not have "train": true, got the role {_preview(message["role"])}: '
                    "only "
                    "messages of the assistant have a loss. Remove it"
                )
            unused_keys.add(f"{name} of {message['role']} messages")
    return message["role"] != ASSISTANT or all(flags.values())


def _parse_template_variables(content: Mapping[str, Any]) -> dict[str, Any]:
    variables = content.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise ValueError(f'"chat_template_kwargs" must be an object, got {_preview(variables)}. Correct it')
    if reserved := sorted(_RESERVED_VARIABLES & variables.keys()):
        raise ValueError(
            f'"chat_template_kwargs" must not have {", ".join(map(repr, reserved))}, which the program sets. Remove it'
        )
    tools = content.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f'"tools" must be a list of objects, or that list as JSON text, got {_preview(tools)}: {error}. '
                "Correct it"
            ) from None
    if not tools or isinstance(tools, str):
        return variables
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(
            f'"tools" must be a list of objects, or that list as JSON text, got {_preview(tools)}. Correct it'
        )
    return {**variables, "tools": tools}


def _preview(value: Any) -> str:
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace").strip()
    else:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except RecursionError:
            text = "a deeply nested value"
    text = text.encode("utf-8", "backslashreplace").decode()  # a log cannot show a lone surrogate
    return text if len(text) <= _MAX_PREVIEW_CHARS else f"{text[:_MAX_PREVIEW_CHARS]}..."


# Record files. Positions refer to the decompressed text.

_GZIP, _ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_PARQUET = b"PAR1"
_ARROW = (arrow_files.FILE_MAGIC, arrow_files.STREAM_MAGIC)
_BOM = b"\xef\xbb\xbf"
_ROWS_PER_BATCH = 256
_BLANK = re.compile(r"[ \t\r\n]*")


class RecordFile:
    """The JSON records in a file: its nonblank lines, or the elements of a single JSON array. A context manager.

    Files compressed with gzip or zstandard are decompressed into a temporary file. Rows in parquet and Arrow files
    are converted to JSON lines in a temporary file, without the nulls that these formats add for absent keys.

    Attributes:
        spans: int64[n, 3], the line or row (from 1), the first byte, and the byte after the last one, for each record.
        digest: SHA-256 of the decompressed file, in hexadecimal.
        size: decompressed file size in bytes.

    Raises:
        DataError: the file cannot be read, is damaged, has no record, or contains a malformed array.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        try:
            self._file = _open_decompressed(Path(path))
        except (OSError, EOFError, ValueError, zlib.error, zstandard.ZstdError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self.path} cannot be read as a file of JSON lines: {error}") from error
        try:
            self.spans, self.digest, self.size = self._scan_records()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, idx: int) -> bytes:
        """Read a record's bytes."""
        _, start, stop = self.spans[idx].tolist()
        self._file.seek(start)
        return self._file.read(stop - start)

    def _scan_records(self) -> tuple[np.ndarray, str, int]:
        digest, spans, position, is_array = hashlib.sha256(), list[tuple[int, int, int]](), 0, False
        for line_number, line in enumerate(self._file, 1):
            digest.update(line)
            if line.strip():
                is_array = is_array or (not spans and line.removeprefix(_BOM).lstrip().startswith(b"["))
                spans.append((line_number, position, position + len(line)))
            position += len(line)
        if is_array:
            self._file.seek(0)
            spans = list(self._array_spans(self._file.read()))
        if not spans:
            raise DataError(f"{self.path} must have a conversation on each line, got none. Name another file")
        return np.array(spans, np.int64), digest.hexdigest(), position

    def _array_spans(self, data: bytes) -> Iterator[tuple[int, int, int]]:
        """Yield (line, first byte, end) for each element in a JSON array."""
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise DataError(f"{self.path}:{line}: a JSON array must be in UTF-8, got {error}. Convert it") from None
        decoder, line, byte_offset, counted_chars = json.JSONDecoder(), 1, 0, 0
        position = text.index("[") + 1
        is_first = True
        while True:
            position = _skip_blanks(text, position)
            line += text.count("\n", counted_chars, position)
            byte_offset += len(text[counted_chars:position].encode())
            counted_chars = position
            try:
                if text[position : position + 1] == "]" and is_first:
                    break
                _, end = decoder.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
                raise DataError(
                    f"{self.path}:{line}: an element of the JSON array must be an object, got "
                    f"{_preview(text[position : position + _MAX_PREVIEW_CHARS].encode())} ({problem}). Correct it"
                ) from None
            yield line, byte_offset, byte_offset + len(text[position:end].encode())
            is_first = False
            position = _skip_blanks(text, end)
            separator = text[position : position + 1]
            if separator == "]":
                break
            if separator != ",":
                line += text.count("\n", counted_chars, position)
                raise DataError(
                    f"{self.path}:{line}: a comma or ] must follow each element of the JSON array, got "
                    f"{_preview(separator.encode()) or 'the end of the file'}. Correct it, or download the file again"
                )
            position += 1
        tail = _skip_blanks(text, position + 1)
        if tail < len(text):
            line += text.count("\n", counted_chars, tail)
            raise DataError(
                f"{self.path}:{line}: nothing must follow the JSON array, got "
                f"{_preview(text[tail : tail + _MAX_PREVIEW_CHARS].encode())}. Write one array, or one object on each "
                "line"
            )


def _skip_blanks(text: str, position: int) -> int:
    """Find the first position from ``position`` on that is not JSON white space."""
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _open_decompressed(path: Path) -> BinaryIO:
    """Open the file, or a temporary file with its decompressed or converted content."""
    file = open(path, "rb")  # noqa: SIM115 - RecordFile closes it
    head = file.read(max(map(len, _ARROW)))
    file.seek(0)
    if not head.startswith((_GZIP, _ZSTANDARD, _PARQUET, *_ARROW)):
        return file
    with file:
        unpacked: BinaryIO = tempfile.TemporaryFile()  # type: ignore[assignment]  # noqa: SIM115
        try:
            if head.startswith(_GZIP):
                with gzip.open(file) as stream:
                    shutil.copyfileobj(stream, unpacked, 1 << 20)
            else:
                unpacked.writelines(
                    _decompress_zstandard(file) if head.startswith(_ZSTANDARD) else _json_rows(path, head)
                )
        except BaseException:
            unpacked.close()
            raise
        unpacked.seek(0)
        return unpacked


def _decompress_zstandard(file: BinaryIO) -> Iterator[bytes]:
    """Decompress all frames. Unlike the library's reader, raise EOFError for a truncated file."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame, is_in_frame = decompressor.decompressobj(), False
    while chunk := file.read(1 << 16):
        while chunk:
            yield frame.decompress(chunk)
            is_in_frame, chunk = not frame.eof, frame.unused_data
            if not is_in_frame:
                frame = decompressor.decompressobj()
    if is_in_frame:
        raise EOFError("it ends in the middle of a zstandard frame")


def _json_rows(path: Path, head: bytes) -> Iterator[bytes]:
    """Convert rows in a parquet or Arrow file to JSON lines."""
    try:
        from pyarrow import ipc, parquet
    except ImportError as error:
        file_type = "parquet" if head.startswith(_PARQUET) else "an Arrow file"
        raise DataError(f"{path} is {file_type}, which needs pyarrow: pip install -e '.[parquet]'") from error
    with open(path, "rb") as file:
        if head.startswith(_PARQUET):
            batches: Any = parquet.ParquetFile(file).iter_batches(_ROWS_PER_BATCH, use_threads=False)
        elif head.startswith(arrow_files.FILE_MAGIC):
            reader = ipc.open_file(file)
            batches = (reader.get_batch(batch_idx) for batch_idx in range(reader.num_record_batches))
        else:
            batches = ipc.open_stream(file)
        for batch in batches:
            batch.validate(full=True)
            for row in batch.to_pylist():
                yield json.dumps(_drop_nulls(row), ensure_ascii=False, default=str).encode() + b"\n"


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _drop_nulls(item) for name, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value
