"""Conversations as samples: lines read, packed by hand, cut, counted, named when bad; the cache; the splits."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron import log
from megatron.data import DataLoader, build_sft_train_valid_test, gpt2_fields, sft_dataset
from megatron.data.blend_paths import BlendPaths
from megatron.data.cache import IndexCache
from megatron.data.conversations import parse_record
from megatron.data.sft_dataset import ConversationFile, SFTDataset
from megatron.errors import DataError
from megatron.tokenizer import build
from megatron.tokenizer.chat import ChatTemplate, find_template
from tests.helpers.chats import ALTERNATING, CHATML, SOME, turns, write_conversations, write_tokenizer


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML)
    return find_template(build("TokenizersJSON", tokenizer_path=folder))


def opened(path: Path, template: ChatTemplate, capacity: int = 400, **others: Any) -> ConversationFile:
    return ConversationFile(path, template, capacity=capacity, **others)


def made(file: ConversationFile, seq_length: int, seed: int = 1) -> SFTDataset:
    return SFTDataset(
        file,  # type: ignore[arg-type]
        documents=(0, file.num_documents),
        seq_length=seq_length,
        seed=seed,
        packing="best-fit",
    )


def test_both_forms_of_a_line_are_one() -> None:
    one = b'{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'  # noqa: E501
    two = b'{"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}'  # noqa: E501
    three = b'\xef\xbb\xbf{"system": "s", "conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]}\r\n'  # noqa: E501
    assert parse_record(one) == parse_record(two) == parse_record(three)
    given = b'{"messages": [{"role": "assistant", "tool_calls": [1]}], "tools": [{}], "chat_template_kwargs": {"x": 3}}'
    assert parse_record(given).more == {"x": 3, "tools": [{}]}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "JSON object in UTF-8, got {: .*Correct it"),
        ("[1]", r'"messages" \(or "conversations", .*\), got \[1\]. Rename'),
        ('{"text": "a"}', "got one with 'text'. Rename"),
        ('{"messages": []}', r'"messages" must be a list of at least one message, got \[\]'),
        ('{"messages": [{"role": "user", "content": "a"}]}', 'role "assistant", got user. Remove the line'),
        ('{"messages": [{"role": "assistant"}]}', "message 1 must be .*content.*got"),
        ('{"messages": [{"role": "assistant", "content": 3}]}', "message 1 must be"),
        ('{"messages": ["a"]}', 'message 1 must be .* got "a"'),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}',
            r'message 1: "content" must be a string, got a list of parts, \[{"type": "text", "text": "a"}\]. Join',
        ),
        ('{"conversations": [{"from": "function_call", "value": "a"}]}', "from.*human or user or gpt"),
        ('{"messages": [{"role": "assistant", "content": "\\ud83d"}]}', r"must not contain U\+D83D"),
        ('{"messages": [{"role": "assistant", "content": "a"}], "tools": "[{\\"\\\\udc00\\": 1}]"}', r"U\+DC00"),
        ('{"messages": ' + "[" * 99_999, "is nested too deeply"),
        (
            '{"messages": [{"role": "assistant", "content": "a"}], "chat_template_kwargs": 3}',
            "must be an object, got 3",
        ),
        *(
            (
                f'{{"messages": [{{"role": "assistant", "content": "a"}}], "chat_template_kwargs": {{"{name}": [0]}}}}',
                f"\"chat_template_kwargs\" must not have '{name}', which the program sets",
            )
            for name in ("messages", "without_loss", "add_generation_prompt", "self")
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, template: ChatTemplate, line: str, problem: str) -> None:
    path = write_conversations(tmp_path / "c.jsonl", SOME[:1])
    path.write_text(path.read_text() + "\n" + line + "\n" + path.read_text())
    with pytest.raises(DataError, match=f"c.jsonl:3: .*{problem}"):
        opened(path, template)


def test_a_lone_surrogate_in_the_name_of_an_unread_key_is_shown_escaped(
    tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("megatron.log.warn_once_per_job", shown.append)
    path = tmp_path / "c.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "\\udfff": 1}'
    )
    opened(path, template)
    assert [line.encode() for line in shown if "keys that have no effect" in line and "\\udfff" in line]


def test_what_a_template_refuses_is_named(tmp_path: Path, template: ChatTemplate) -> None:
    strict = ChatTemplate(ALTERNATING, template.tokenizer, source="strict", special=template.special)
    path = write_conversations(tmp_path / "c.jsonl", [SOME[0], turns("a", "b", system="s")])
    with pytest.raises(
        DataError, match="c.jsonl:2: the chat template .strict. rejects the conversation: roles must alternate"
    ):
        opened(path, strict)


def test_files_without_conversations_are_refused(tmp_path: Path, template: ChatTemplate) -> None:
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match="blank.jsonl must have a conversation on each line, got none"):
        opened(tmp_path / "blank.jsonl", template)
    with pytest.raises(DataError, match="none.jsonl must be a file"):
        opened(tmp_path / "none.jsonl", template)


def test_each_conversation_is_a_document_with_its_mask(tmp_path: Path, template: ChatTemplate) -> None:
    file = opened(write_conversations(tmp_path / "c.jsonl", SOME), template)
    assert file.num_documents == len(SOME)
    for number, messages in enumerate(SOME):
        wanted, signed = template.encode(messages), file.read(number)
        assert np.where(signed < 0, ~signed, signed).tolist() == wanted.ids
        assert (signed < 0).tolist() == wanted.is_said
        assert file.read(number, 2, 3).tolist() == signed[2:5].tolist()
    whole = np.concatenate([file.read(number) for number in range(len(SOME))])
    assert file.read_tokens(3, 50).tolist() == whole[3:53].tolist()
    assert file.num_tokens == len(whole) == int(file.starts_of(0, len(SOME))[-1])


def test_packed_samples_by_hand(tmp_path: Path, template: ChatTemplate) -> None:
    """Labels, loss mask, positions and documents of a packed sample, computed from the conversations alone."""
    path = write_conversations(tmp_path / "c.jsonl", [turns("a", "bc"), turns("d", "e", "f", "g")])
    encoded = [template.encode(turns("d", "e", "f", "g")), template.encode(turns("a", "bc"))]  # the longest first
    sizes = [len(one.ids) for one in encoded]
    length = sum(sizes) + 2  # three tokens of padding in L + 1
    sample = made(opened(path, template, length + 1), length)[0]
    rows = {name: torch.from_numpy(array)[None] for name, array in sample.items()}
    fields = gpt2_fields(rows["text"], segments=rows["segments"], loss_mask=rows["loss_mask"])
    ids = [token for one in encoded for token in one.ids]
    assert fields["tokens"][0, : len(ids)].tolist() == ids
    assert fields["position_ids"][0, : len(ids)].tolist() == [*range(sizes[0]), *range(sizes[1])]
    assert fields["segment_ids"][0].tolist() == [0] * sizes[0] + [1] * sizes[1] + [-1] * (length - len(ids))
    predicted = []
    for one in encoded:
        steps = zip(one.ids, one.ids[1:], one.is_said[1:], strict=False)
        predicted += [(token, label) for token, label, is_said in steps if is_said]
    has_loss = fields["loss_mask"][0] > 0
    tokens, labels = (fields[name][0, has_loss].tolist() for name in ("tokens", "labels"))
    assert list(zip(tokens, labels, strict=True)) == predicted
    end = template.stop_id
    assert sum(label == end for _, label in predicted) == 3  # the end of each of the assistant's turns is learned
    assert fields["loss_mask"].dtype == torch.float32


def test_long_ones_are_cut_from_the_end_and_counted(
    tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "warn_once", said.append)
    conversations = [turns("a", "b" * 50), turns("c" * 80, "d"), turns("e", "f")]
    path = write_conversations(tmp_path / "c.jsonl", conversations)
    file = opened(path, template, 40)
    assert file.sizes.tolist() == [40, 0, len(template.encode(conversations[2]).ids)]
    assert file.read(0).tolist() == opened(path, template).read(0)[:40].tolist()
    assert len(said) == 1
    assert (
        "2 of 3 conversations are longer than --seq-length + 1 = 40 tokens and are truncated at the end; 1 have"
        in said[0]
    )
    with pytest.raises(DataError, match=r"c.jsonl:1: .* at most --seq-length \+ 1 = 40 tokens, got .*--sft-overlong"):
        opened(path, template, 40, overlong="refuse")
    assert {int(n) for i in range(4) for n in made(file, 39)[i]["text"]} <= set(range(template.tokenizer.vocab_size))


def test_a_conversation_whose_only_loss_is_on_its_first_token_is_left_out(
    tmp_path: Path, template: ChatTemplate
) -> None:
    text = "{% for m in messages %}{% if loop.first %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
    plain = ChatTemplate(text + "{{ m.content }}{% endif %}{% endfor %}", template.tokenizer, source="", special={})
    lines = [[{"role": "assistant", "content": said}, {"role": "user", "content": "!"}] for said in ("x", "xy")]
    file = opened(write_conversations(tmp_path / "c.jsonl", lines), plain)
    assert plain.encode(lines[0]).is_said == [True, False]
    assert (file.sizes.tolist(), file.num_left_out) == ([0, 3], 1)


def test_other_programs_keys_take_effect_or_are_reported_once(
    tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read on a first start and from the cache, where nothing is parsed, in parts of two."""
    said: list[str] = []
    monkeypatch.setattr(log, "warn_once_per_job", said.append)
    monkeypatch.setattr(sft_dataset, "_LINES_AT_ONCE", 2)
    monkeypatch.setattr(sft_dataset, "_IN_MEMORY_BELOW_BYTES", 0)
    silent = [*turns("a", "b"), *turns("c", "d")]
    silent[1] = {**silent[1], "weight": 0}  # type: ignore[dict-item]
    records = [
        {"messages": silent, "id": 1},
        {"messages": turns("a", "b"), "system": "s", "source": "x"},
        {"instruction": "a", "output": "b", "id": 2, "é": 1},
        {"messages": [{**turns("a")[0], "name": "n"}, turns("a", "b")[1]], "tools": "[{}]"},
    ]
    path = tmp_path / "c.json.gz"
    path.write_bytes(gzip.compress(json.dumps(records, indent=1).encode()))
    expected = [
        template.encode(turns("a", "b", "c", "d"), without_loss={1}),
        template.encode(turns("a", "b", system="s")),
        template.encode(turns("a", "b")),
        template.encode(turns("a", "b")),
    ]
    for _ in range(2):
        file = opened(path, template, cache=IndexCache(tmp_path / "cache"))
        rows = [file.read(number) for number in range(4)]
        assert [np.where(row < 0, ~row, row).tolist() for row in rows] == [one.ids for one in expected]
        assert [(row < 0).tolist() for row in rows] == [one.is_said for one in expected]
        assert file.unread == ["id", "messages[].name", "source", "tools", "é"]
        (line,) = said
        assert line.startswith(f"{path}: keys that have no effect") and "messages[].name, source, tools, é" in line
        said.clear()
        monkeypatch.setattr(ChatTemplate, "encode", None)


def test_a_file_that_is_read_otherwise_than_before_has_another_fingerprint(
    tmp_path: Path, template: ChatTemplate
) -> None:
    with_tools = {"messages": turns("a", "b"), "tools": [{}]}

    def fingerprint(record: dict[str, Any], template: ChatTemplate = template) -> tuple[str, str]:
        (tmp_path / "c.jsonl").write_text(json.dumps(record) + "\n")
        file = opened(tmp_path / "c.jsonl", template)
        return file.fingerprint, hashlib.sha256(f"{file._digest}:{template.key}".encode()).hexdigest()[:16]

    both = ChatTemplate(
        CHATML, template.tokenizer, source="", special=template.special, named={"tool_use": CHATML, "rag": "x"}
    )
    for record in (with_tools, {"messages": turns("a", "b", system="s")}):
        found, before = fingerprint(record)  # checkpoints of 8c23b9e6 contain the second
        assert found == before
    assert fingerprint({"messages": turns("a", "b")}, both)[0] == fingerprint({"messages": turns("a", "b")})[1]
    for record, one in ((with_tools, both), ({**with_tools, "tools": "[{}]"}, template)):
        found, before = fingerprint(record, one)
        assert found != before


def test_a_template_without_an_end_of_turn_is_reported(
    tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "warn_once_per_job", said.append)
    path = write_conversations(tmp_path / "c.jsonl", SOME)
    for text in (CHATML, CHATML.replace("im_end", "stop")):
        other = ChatTemplate(text, template.tokenizer, source="", special=template.special)
        paths, needed = BlendPaths(data_path=str(path), split="1"), (True, False, False)
        build_sft_train_valid_test(paths, seq_length=200, seed=1, template=other, needed=needed)
    (line,) = said
    assert "tools/train_tokenizer.py --special-tokens '<|stop|>'" in line


def test_parts_are_kept_for_other_processes(
    tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_conversations(tmp_path / "c.jsonl", SOME * 3)
    plain = opened(path, template)
    sizes, whole = plain.sizes.tolist(), plain.read_tokens(0, plain.num_tokens).tolist()
    rows = [plain.read(number).tolist() for number in range(12)]
    monkeypatch.setattr(sft_dataset, "_LINES_AT_ONCE", 5)
    monkeypatch.setattr(sft_dataset, "_IN_MEMORY_BELOW_BYTES", 0)
    cache = IndexCache(tmp_path / "cache")
    for _ in range(2):
        file = opened(path, template, cache=cache)
        assert file.sizes.tolist() == sizes
        assert [file.read(number).tolist() for number in range(12)] == rows
        assert file.read_tokens(7, 300).tolist() == whole[7:307]
        assert [file.place(n) for n in (0, 11)] == [f"{path}:1", f"{path}:12"]
        monkeypatch.setattr(ChatTemplate, "encode", None)  # the second time nothing is encoded


def test_the_fingerprint_covers_file_template_and_tokenizer(tmp_path: Path, template: ChatTemplate) -> None:
    path = write_conversations(tmp_path / "c.jsonl", SOME)
    other = ChatTemplate("{# other #}" + CHATML, template.tokenizer, source="", special=template.special)
    more = write_tokenizer(tmp_path / "other", CHATML)
    fields = json.loads((more / "tokenizer.json").read_text())
    fields["normalizer"] = {"type": "NFC"}
    (more / "tokenizer.json").write_text(json.dumps(fields))
    apart = find_template(build("TokenizersJSON", tokenizer_path=more))

    def fingerprint(template: ChatTemplate, path: Path = path, seed: int = 1, length: int = 200) -> str:
        paths = BlendPaths(data_path=str(path), split="1")
        train, _, _ = build_sft_train_valid_test(
            paths, seq_length=length, seed=seed, template=template, needed=(True, False, False)
        )
        assert train is not None
        return str(train.order.state(0)["fingerprints"])

    changed = write_conversations(tmp_path / "d.jsonl", [*SOME[:-1], turns("one", "2")])
    every = [
        fingerprint(template), fingerprint(other), fingerprint(apart), fingerprint(template, changed),
        fingerprint(template, seed=2), fingerprint(template, length=201),
    ]  # fmt: skip
    assert len({text.partition(":")[2] for text in every}) == len(every)
    assert fingerprint(template) == every[0]


@pytest.mark.parametrize("split_by", ["range", "hash"])
def test_splits_share_no_conversation_and_an_epoch_has_each_once(
    tmp_path: Path, template: ChatTemplate, split_by: str
) -> None:
    conversations = [turns(f"q{number}", f"answer {number}") for number in range(60)]
    path = write_conversations(tmp_path / "c.jsonl", conversations)
    paths = BlendPaths(data_path=str(path), split="6,3,1", split_by=split_by)
    splits = build_sft_train_valid_test(paths, seq_length=100, seed=3, template=template)
    found = []
    for dataset in splits:
        assert dataset is not None
        part = next(iter(dataset.parts.values()))
        pieces = [piece for index in range(part.samples_per_epoch) for piece in _texts(part[index], template)]
        assert len(pieces) == len(set(pieces))
        found += pieces
    assert sorted(found) == sorted(template.render(one) for one in conversations)
    assert splits[0] is not None and splits[0].order.epochs(0) == {"c.jsonl": 0.0}


def _texts(sample: dict[str, np.ndarray], template: ChatTemplate) -> list[str]:
    segments = sample["segments"]
    return [
        template.tokenizer.decode(sample["text"][segments == number].tolist()) for number in range(segments.max() + 1)
    ]


def test_validation_may_have_a_file_of_its_own_and_files_are_mixed(tmp_path: Path, template: ChatTemplate) -> None:
    one = write_conversations(tmp_path / "a.jsonl", SOME)
    two = write_conversations(tmp_path / "b.jsonl", [turns("x", "y")])
    paths = BlendPaths(train_data_path=f"3 {one} 1 {two}", valid_data_path=str(two))
    train, valid, test = build_sft_train_valid_test(
        paths, seq_length=200, seed=3, template=template, needed=(True, True, False)
    )
    assert train is not None and valid is not None and test is None
    assert train.order.cursors(40) == {"a.jsonl": 30, "b.jsonl": 10}
    assert _texts(valid[0], template) == [template.render(turns("x", "y"))]


def test_micro_batches_go_on_in_mid_epoch(tmp_path: Path, template: ChatTemplate) -> None:
    file = opened(write_conversations(tmp_path / "c.jsonl", SOME * 9), template, 101)
    dataset = made(file, 100)
    assert dataset.samples_per_epoch > 7

    def batches(start: int, count: int) -> list[dict[str, torch.Tensor]]:
        loader = DataLoader(
            dataset, micro_batch_size=1, num_micro_batches=2, data_rank=0, data_size=1, samples_consumed=start
        )
        iterator = iter(loader)
        return [next(iterator) for _ in range(count)]

    whole, rest = batches(0, 12), batches(6, 6)
    for one, other in zip(whole[6:], rest, strict=True):
        assert set(one) == {"text", "segments", "loss_mask"}
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert all(bool(batch["loss_mask"].any()) for batch in whole)


def test_json_of_any_script_is_kept(tmp_path: Path, template: ChatTemplate) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": SOME[2]}, ensure_ascii=True) + "\r\n")
    assert template.tokenizer.decode(np.abs(opened(path, template).read(0)[:10]).tolist()).startswith("<|im_start|>")
