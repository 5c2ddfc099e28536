"""Conversations: formats of other programs, gzip and arrays, and bad records named with file and line."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from megatron.data.conversations import Conversation, RecordFile, parse_record
from megatron.errors import DataError

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
TOOL = {"type": "function", "function": {"name": "add", "description": "é <b>"}}


def parse_conversation(**record: Any) -> Conversation:
    return parse_record(json.dumps(record).encode())


def test_tools_given_as_json_text_are_parsed() -> None:
    conversation = parse_conversation(messages=[QUESTION, ANSWER], tools=json.dumps([TOOL]))
    assert conversation.template_variables == {"tools": [TOOL]}
    assert conversation.differs_from_v1 and not parse_conversation(messages=[ANSWER], tools=[TOOL]).differs_from_v1
    for empty_tools in ("", " ", "[]", "null", [], None):
        assert parse_conversation(messages=[ANSWER], tools=empty_tools).template_variables == {}


@pytest.mark.parametrize("tools", ["[{]", "7", '{"name": "add"}', {"name": "add"}, ["add"], "[" * 9999])
def test_tools_of_another_type_are_rejected(tools: Any) -> None:
    with pytest.raises(ValueError, match='"tools" must be a list of objects, or that list as JSON text, got'):
        parse_conversation(messages=[ANSWER], tools=tools)


@pytest.mark.parametrize("key", ["weight", "loss", "train"])
def test_zero_weight_message_has_no_loss_and_key_is_hidden_from_template(key: str) -> None:
    messages = [QUESTION, {**ANSWER, key: 0}, QUESTION, {**ANSWER, key: True}, QUESTION, {**ANSWER, key: False}]
    conversation = parse_conversation(messages=[*messages, QUESTION, {**ANSWER, key: None}])
    assert conversation.without_loss == {1, 5}
    assert conversation.messages == [QUESTION, ANSWER] * 4
    sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", key: 0.0}]
    assert parse_conversation(system="s", conversations=sharegpt).without_loss == {2}
    for invalid_value in (0.5, "false", [0], 2):
        with pytest.raises(ValueError, match=f'message 2: "{key}" must be 0 or 1 .false or true., got'):
            parse_conversation(messages=[QUESTION, {**ANSWER, key: invalid_value}])


def test_loss_weight_on_other_role_is_reported_or_rejected() -> None:
    assert parse_conversation(messages=[{**QUESTION, "weight": 0, "train": False}, ANSWER]).unused_keys == set()
    assert parse_conversation(messages=[{**QUESTION, "weight": 1}, ANSWER]).unused_keys == {"weight of user messages"}
    with pytest.raises(ValueError, match='message 1 must not have "train": true, got the role "user"'):
        parse_conversation(messages=[{**QUESTION, "train": True}, ANSWER])


def test_system_field_becomes_first_message() -> None:
    system = {"role": "system", "content": "s"}
    for form in ({"messages": [QUESTION, ANSWER]}, {"conversations": [QUESTION, ANSWER]}):
        assert parse_conversation(system="s", **form).messages == [system, QUESTION, ANSWER]
        assert (
            parse_conversation(system="", **form).messages
            == parse_conversation(system=None, **form).messages
            == [QUESTION, ANSWER]
        )
    assert parse_conversation(system="s", messages=[system, QUESTION, ANSWER]).messages == [system, QUESTION, ANSWER]
    with pytest.raises(ValueError, match=r'"system" \("s"\) and the first message .* \("t"\) differ'):
        parse_conversation(system="s", messages=[{"role": "system", "content": "t"}, ANSWER])
    with pytest.raises(ValueError, match='"system" must be a string, got 3'):
        parse_conversation(system=3, messages=[ANSWER])


def test_alpaca_record_becomes_question_and_answer() -> None:
    assert parse_conversation(instruction="q", input="", output="a").messages == [QUESTION, ANSWER]
    assert parse_conversation(instruction="q", output="a").messages == [QUESTION, ANSWER]
    assert parse_conversation(instruction="q", input="x", output="a").messages == [
        {"role": "user", "content": "q\nx"},
        ANSWER,
    ]
    with_history = parse_conversation(instruction="q", output="a", history=[["q", "a"]], system="s", text="rendered")
    assert with_history.messages == [{"role": "system", "content": "s"}, QUESTION, ANSWER, QUESTION, ANSWER]
    assert with_history.unused_keys == {"text"}
    for invalid_record in (
        {"instruction": "q"},
        {"instruction": 3, "output": "a"},
        {"instruction": "q", "output": "a", "input": 3},
    ):
        with pytest.raises(ValueError, match='must have the strings "instruction" and "output"'):
            parse_conversation(**invalid_record)
    with pytest.raises(ValueError, match=r'"history" must be a list of \[question, answer\], got \["q"\]'):
        parse_conversation(instruction="q", output="a", history=["q"])


def test_ignored_keys_are_reported() -> None:
    conversation = parse_conversation(
        id=7, source=None, messages=[QUESTION, {**ANSWER, "name": "n"}], tools=[TOOL], chat_template_kwargs={"x": 1}
    )
    assert conversation.unused_keys == {"id"}
    assert conversation.template_keys == {"messages[].name": "name", "tools": "tools", "x": "x"}
    sharegpt = parse_conversation(conversations=[{"from": "gpt", "value": "a", "score": 1}])
    assert sharegpt.unused_keys == {"conversations[].score"}


def test_deeply_nested_record_raises() -> None:
    for record in (b'{"messages": ' + b"[" * 100_000, b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"):
        with pytest.raises(ValueError, match="a line is nested too deeply"):
            parse_record(record)


# Files.


def records(path: Path) -> list[tuple[int, Any]]:
    with RecordFile(path) as file:
        lines = file.spans[:, 0].tolist()
        return [(line, json.loads(file.read(idx).decode("utf-8-sig"))) for idx, line in enumerate(lines)]


LINES = '\ufeff{"n": 1}\n\n  {"n": "é"}\r\n{"n": 3}'
ARRAY = '\ufeff [{"n": 1},\n\n  {"n":\n "é"}\r\n, {"n": 3} ]\n'


@pytest.mark.parametrize(("text", "lines"), [(LINES, [1, 3, 4]), (ARRAY, [1, 3, 5])])
def test_json_lines_and_arrays_yield_same_records_with_any_compression(
    tmp_path: Path, text: str, lines: list[int]
) -> None:
    data = text.encode()
    read_records, digests = [], set()
    for name, content in (("a", data), ("b.gz", gzip.compress(data)), ("c.zst", zstandard.compress(data))):
        (tmp_path / name).write_bytes(content)
        read_records.append(records(tmp_path / name))
        with RecordFile(tmp_path / name) as file:
            digests.add((file.digest, file.size))
    assert read_records == [list(zip(lines, [{"n": 1}, {"n": "é"}, {"n": 3}], strict=True))] * 3
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'[{"n": 1},\n {"n": }]', "f:2: an element of the JSON array must be an object, got"),
        (b'[{"n": 1}\n {"n": 2}]', "f:2: a comma or ] must follow each element"),
        (b'[{"n": 1}\n', 'f:2: a comma or ] must follow each element .* got ""|the end of the file'),
        (b'[{"n": 1},\n', "f:2: an element of the JSON array must be an object"),
        (b'[{"n": 1}]\n[{"n": 2}]', "f:2: nothing must follow the JSON array"),
        (b'[{"n": 1},\n' + b"[" * 100_000, "f:2: an element of the JSON array .*nested too deeply"),
        (b'[{"n": 1},\n{"n": "\xff"}]', "f:2: a JSON array must be in UTF-8"),
        (b" [] ", "f must have a conversation"),
        (b"", "f must have a conversation"),
        (
            gzip.compress(b'{"n": 1}' * 99)[:-9],
            "f cannot be read as a file of JSON lines: Compressed file ended",
        ),
        (
            zstandard.compress(b"{}\n" * 99_999 + bytes(range(256)))[:-40],
            "f cannot be read as a file of JSON lines: it ends in the middle of a zstandard frame",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_file_is_named_with_line(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(DataError, match=problem):
        records(tmp_path / "f")


@pytest.mark.parametrize("format", ["parquet", "stream", "file"])
def test_table_rows_become_records_without_null_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"messages": [{"role": "user", "content": "q", "weight": None}, {**ANSWER, "weight": 0}], "id": 1},
        {"messages": [{**QUESTION, "weight": None}, {**ANSWER, "weight": None}], "id": None},
    ]
    table, path = arrow.Table.from_pylist(rows), tmp_path / "c.data"
    if format == "parquet":
        parquet.write_table(table, path)
    else:
        with open(path, "wb") as file:
            writer = (arrow.ipc.new_stream if format == "stream" else arrow.ipc.new_file)(file, table.schema)
            writer.write_table(table)
            writer.close()
    read_records = records(path)
    assert read_records == [
        (1, {"messages": [QUESTION, {**ANSWER, "weight": 0}], "id": 1}),
        (2, {"messages": [QUESTION, ANSWER]}),
    ]
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(DataError, match="c.data cannot be read as a file of JSON lines"):
        records(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"c.data is (parquet|an Arrow file), which needs pyarrow: .*\[parquet\]"):
        records(path)
