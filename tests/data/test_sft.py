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
from tests.helpers.chats import ALTERNATING, CHATML, CONVERSATIONS, make_messages, write_conversations, write_tokenizer


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML)
    return find_template(build("TokenizersJSON", tokenizer_path=folder))


def open_conversations(path: Path, template: ChatTemplate, capacity: int = 400, **options: Any) -> ConversationFile:
    return ConversationFile(path, template, capacity=capacity, **options)


def make_dataset(file: ConversationFile, seq_length: int, seed: int = 1) -> SFTDataset:
    return SFTDataset(
        file,  # type: ignore[arg-type]
        documents=(0, file.num_documents),
        seq_length=seq_length,
        seed=seed,
        packing="best-fit",
    )


def test_openai_and_sharegpt_lines_parse_equally() -> None:
    openai = b'{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'  # noqa: E501
    sharegpt = b'{"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}'  # noqa: E501
    sharegpt_with_system = b'\xef\xbb\xbf{"system": "s", "conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]}\r\n'  # noqa: E501
    assert parse_record(openai) == parse_record(sharegpt) == parse_record(sharegpt_with_system)
    with_tools = (
        b'{"messages": [{"role": "assistant", "tool_calls": [1]}], "tools": [{}], "chat_template_kwargs": {"x": 3}}'
    )
    assert parse_record(with_tools).template_variables == {"x": 3, "tools": [{}]}


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
def test_bad_line_is_named(tmp_path: Path, template: ChatTemplate, line: str, problem: str) -> None:
    path = write_conversations(tmp_path / "c.jsonl", CONVERSATIONS[:1])
    path.write_text(path.read_text() + "\n" + line + "\n" + path.read_text())
    with pytest.raises(DataError, match=f"c.jsonl:3: .*{problem}"):
        open_conversations(path, template)


def test_surrogate_in_ignored_key_is_escaped(
    tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr("megatron.log.warn_once_per_job", warnings.append)
    path = tmp_path / "c.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "\\udfff": 1}'
    )
    open_conversations(path, template)
    assert [line.encode() for line in warnings if "keys that have no effect" in line and "\\udfff" in line]


def test_template_rejection_is_named(tmp_path: Path, template: ChatTemplate) -> None:
    strict = ChatTemplate(ALTERNATING, template.tokenizer, source="strict", special=template.special)
    path = write_conversations(tmp_path / "c.jsonl", [CONVERSATIONS[0], make_messages("a", "b", system="s")])
    with pytest.raises(
        DataError, match="c.jsonl:2: the chat template .strict. rejects the conversation: roles must alternate"
    ):
        open_conversations(path, strict)


def test_files_without_conversations_are_rejected(tmp_path: Path, template: ChatTemplate) -> None:
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match="blank.jsonl must have a conversation on each line, got none"):
        open_conversations(tmp_path / "blank.jsonl", template)
    with pytest.raises(DataError, match="none.jsonl cannot be read as a file of JSON lines"):
        open_conversations(tmp_path / "none.jsonl", template)


def test_each_conversation_is_document_with_loss_mask(tmp_path: Path, template: ChatTemplate) -> None:
    file = open_conversations(write_conversations(tmp_path / "c.jsonl", CONVERSATIONS), template)
    assert file.num_documents == len(CONVERSATIONS)
    for document_idx, messages in enumerate(CONVERSATIONS):
        expected, tokens = template.encode(messages), file.read(document_idx)
        assert np.where(tokens < 0, ~tokens, tokens).tolist() == expected.ids
        assert (tokens < 0).tolist() == expected.has_loss
        assert file.read(document_idx, 2, 3).tolist() == tokens[2:5].tolist()
    all_tokens = np.concatenate([file.read(document_idx) for document_idx in range(len(CONVERSATIONS))])
    assert file.read_tokens(3, 50).tolist() == all_tokens[3:53].tolist()
    assert file.num_tokens == len(all_tokens) == int(file.starts_of(0, len(CONVERSATIONS))[-1])


def test_packed_sample_fields_match_conversations(tmp_path: Path, template: ChatTemplate) -> None:
    """Labels, loss mask, positions and documents of a packed sample, computed from the conversations alone."""
    path = write_conversations(tmp_path / "c.jsonl", [make_messages("a", "bc"), make_messages("d", "e", "f", "g")])
    encoded = [
        template.encode(make_messages("d", "e", "f", "g")),
        template.encode(make_messages("a", "bc")),
    ]  # the longest first
    lengths = [len(conversation.ids) for conversation in encoded]
    length = sum(lengths) + 2  # three tokens of padding in L + 1
    sample = make_dataset(open_conversations(path, template, length + 1), length)[0]
    rows = {name: torch.from_numpy(array)[None] for name, array in sample.items()}
    fields = gpt2_fields(rows["text"], segments=rows["segments"], loss_mask=rows["loss_mask"])
    ids = [token for conversation in encoded for token in conversation.ids]
    assert fields["tokens"][0, : len(ids)].tolist() == ids
    assert fields["position_ids"][0, : len(ids)].tolist() == [*range(lengths[0]), *range(lengths[1])]
    assert fields["segment_ids"][0].tolist() == [0] * lengths[0] + [1] * lengths[1] + [-1] * (length - len(ids))
    predicted = []
    for conversation in encoded:
        transitions = zip(conversation.ids, conversation.ids[1:], conversation.has_loss[1:], strict=False)
        predicted += [(token, label) for token, label, has_label in transitions if has_label]
    has_loss = fields["loss_mask"][0] > 0
    tokens, labels = (fields[name][0, has_loss].tolist() for name in ("tokens", "labels"))
    assert list(zip(tokens, labels, strict=True)) == predicted
    end = template.stop_id
    assert sum(label == end for _, label in predicted) == 3  # the end of each of the assistant's turns is learned
    assert fields["loss_mask"].dtype == torch.float32


def test_long_conversations_are_truncated_and_counted(
    tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(log, "warn_once", warnings.append)
    conversations = [make_messages("a", "b" * 50), make_messages("c" * 80, "d"), make_messages("e", "f")]
    path = write_conversations(tmp_path / "c.jsonl", conversations)
    file = open_conversations(path, template, 40)
    assert file.document_lengths.tolist() == [40, 0, len(template.encode(conversations[2]).ids)]
    assert file.read(0).tolist() == open_conversations(path, template).read(0)[:40].tolist()
    assert len(warnings) == 1
    assert (
        "2 of 3 conversations are longer than --seq-length + 1 = 40 tokens and are truncated at the end; 1 have"
        in warnings[0]
    )
    with pytest.raises(DataError, match=r"c.jsonl:1: .* at most --seq-length \+ 1 = 40 tokens, got .*--sft-overlong"):
        open_conversations(path, template, 40, overlong="refuse")
    assert {int(token) for idx in range(4) for token in make_dataset(file, 39)[idx]["text"]} <= set(
        range(template.tokenizer.vocab_size)
    )


def test_conversation_with_loss_only_on_first_token_is_skipped(tmp_path: Path, template: ChatTemplate) -> None:
    text = "{% for m in messages %}{% if loop.first %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
    content_template = ChatTemplate(
        text + "{{ m.content }}{% endif %}{% endfor %}", template.tokenizer, source="", special={}
    )
    lines = [[{"role": "assistant", "content": content}, {"role": "user", "content": "!"}] for content in ("x", "xy")]
    file = open_conversations(write_conversations(tmp_path / "c.jsonl", lines), content_template)
    assert content_template.encode(lines[0]).has_loss == [True, False]
    assert (file.document_lengths.tolist(), file.num_dropped) == ([0, 3], 1)


def test_foreign_keys_take_effect_or_are_reported_once(
    tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read on a first start and from the cache, where nothing is parsed, in parts of two."""
    warnings: list[str] = []
    monkeypatch.setattr(log, "warn_once_per_job", warnings.append)
    monkeypatch.setattr(sft_dataset, "_CHUNK_CONVERSATIONS", 2)
    monkeypatch.setattr(sft_dataset, "_IN_MEMORY_BELOW_BYTES", 0)
    masked_messages = [*make_messages("a", "b"), *make_messages("c", "d")]
    masked_messages[1] = {**masked_messages[1], "weight": 0}  # type: ignore[dict-item]
    records = [
        {"messages": masked_messages, "id": 1},
        {"messages": make_messages("a", "b"), "system": "s", "source": "x"},
        {"instruction": "a", "output": "b", "id": 2, "é": 1},
        {"messages": [{**make_messages("a")[0], "name": "n"}, make_messages("a", "b")[1]], "tools": "[{}]"},
    ]
    path = tmp_path / "c.json.gz"
    path.write_bytes(gzip.compress(json.dumps(records, indent=1).encode()))
    expected = [
        template.encode(make_messages("a", "b", "c", "d"), without_loss={1}),
        template.encode(make_messages("a", "b", system="s")),
        template.encode(make_messages("a", "b")),
        template.encode(make_messages("a", "b")),
    ]
    for _ in range(2):
        file = open_conversations(path, template, cache=IndexCache(tmp_path / "cache"))
        rows = [file.read(document_idx) for document_idx in range(4)]
        assert [np.where(row < 0, ~row, row).tolist() for row in rows] == [
            conversation.ids for conversation in expected
        ]
        assert [(row < 0).tolist() for row in rows] == [conversation.has_loss for conversation in expected]
        assert file.unused_keys == ["id", "messages[].name", "source", "tools", "é"]
        (line,) = warnings
        assert line.startswith(f"{path}: keys that have no effect") and "messages[].name, source, tools, é" in line
        warnings.clear()
        monkeypatch.setattr(ChatTemplate, "encode", None)


def test_parsing_changes_change_fingerprint(tmp_path: Path, template: ChatTemplate) -> None:
    with_tools = {"messages": make_messages("a", "b"), "tools": [{}]}

    def fingerprint(record: dict[str, Any], template: ChatTemplate = template) -> tuple[str, str]:
        (tmp_path / "c.jsonl").write_text(json.dumps(record) + "\n")
        file = open_conversations(tmp_path / "c.jsonl", template)
        return file.fingerprint, hashlib.sha256(f"{file._digest}:{template.key}".encode()).hexdigest()[:16]

    with_named_templates = ChatTemplate(
        CHATML, template.tokenizer, source="", special=template.special, named={"tool_use": CHATML, "rag": "x"}
    )
    for record in (with_tools, {"messages": make_messages("a", "b", system="s")}):
        fingerprint_value, old_fingerprint = fingerprint(record)  # checkpoints of 8c23b9e6 contain the second
        assert fingerprint_value == old_fingerprint
    assert (
        fingerprint({"messages": make_messages("a", "b")}, with_named_templates)[0]
        == fingerprint({"messages": make_messages("a", "b")})[1]
    )
    for record, chat_template in ((with_tools, with_named_templates), ({**with_tools, "tools": "[{}]"}, template)):
        fingerprint_value, old_fingerprint = fingerprint(record, chat_template)
        assert fingerprint_value != old_fingerprint


def test_missing_end_of_turn_token_is_reported(
    tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(log, "warn_once_per_job", warnings.append)
    path = write_conversations(tmp_path / "c.jsonl", CONVERSATIONS)
    for text in (CHATML, CHATML.replace("im_end", "stop")):
        other_template = ChatTemplate(text, template.tokenizer, source="", special=template.special)
        paths, needed = BlendPaths(data_path=str(path), split="1"), (True, False, False)
        build_sft_train_valid_test(paths, seq_length=200, seed=1, template=other_template, needed=needed)
    (line,) = warnings
    assert "tools/train_tokenizer.py --special-tokens '<|stop|>'" in line


def test_encoded_chunks_are_cached_for_other_processes(
    tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_conversations(tmp_path / "c.jsonl", CONVERSATIONS * 3)
    uncached = open_conversations(path, template)
    lengths, all_tokens = uncached.document_lengths.tolist(), uncached.read_tokens(0, uncached.num_tokens).tolist()
    rows = [uncached.read(document_idx).tolist() for document_idx in range(12)]
    monkeypatch.setattr(sft_dataset, "_CHUNK_CONVERSATIONS", 5)
    monkeypatch.setattr(sft_dataset, "_IN_MEMORY_BELOW_BYTES", 0)
    cache = IndexCache(tmp_path / "cache")
    for _ in range(2):
        file = open_conversations(path, template, cache=cache)
        assert file.document_lengths.tolist() == lengths
        assert [file.read(document_idx).tolist() for document_idx in range(12)] == rows
        assert file.read_tokens(7, 300).tolist() == all_tokens[7:307]
        assert [file.location(document_idx) for document_idx in (0, 11)] == [f"{path}:1", f"{path}:12"]
        monkeypatch.setattr(ChatTemplate, "encode", None)  # the second time nothing is encoded


def test_fingerprint_covers_file_template_and_tokenizer(tmp_path: Path, template: ChatTemplate) -> None:
    path = write_conversations(tmp_path / "c.jsonl", CONVERSATIONS)
    other_template = ChatTemplate("{# other #}" + CHATML, template.tokenizer, source="", special=template.special)
    other_folder = write_tokenizer(tmp_path / "other", CHATML)
    fields = json.loads((other_folder / "tokenizer.json").read_text())
    fields["normalizer"] = {"type": "NFC"}
    (other_folder / "tokenizer.json").write_text(json.dumps(fields))
    other_tokenizer_template = find_template(build("TokenizersJSON", tokenizer_path=other_folder))

    def fingerprint(template: ChatTemplate, path: Path = path, seed: int = 1, length: int = 200) -> str:
        paths = BlendPaths(data_path=str(path), split="1")
        train, _, _ = build_sft_train_valid_test(
            paths, seq_length=length, seed=seed, template=template, needed=(True, False, False)
        )
        assert train is not None
        return str(train.order.state(0)["fingerprints"])

    changed = write_conversations(tmp_path / "d.jsonl", [*CONVERSATIONS[:-1], make_messages("one", "2")])
    fingerprints = [
        fingerprint(template), fingerprint(other_template), fingerprint(other_tokenizer_template),
        fingerprint(template, changed), fingerprint(template, seed=2), fingerprint(template, length=201),
    ]  # fmt: skip
    assert len({text.partition(":")[2] for text in fingerprints}) == len(fingerprints)
    assert fingerprint(template) == fingerprints[0]


@pytest.mark.parametrize("split_by", ["range", "hash"])
def test_splits_share_no_conversation_and_epoch_contains_each_once(
    tmp_path: Path, template: ChatTemplate, split_by: str
) -> None:
    conversations = [make_messages(f"q{idx}", f"answer {idx}") for idx in range(60)]
    path = write_conversations(tmp_path / "c.jsonl", conversations)
    paths = BlendPaths(data_path=str(path), split="6,3,1", split_by=split_by)
    splits = build_sft_train_valid_test(paths, seq_length=100, seed=3, template=template)
    texts = []
    for dataset in splits:
        assert dataset is not None
        split = next(iter(dataset.parts.values()))
        split_texts = [
            text for index in range(split.samples_per_epoch) for text in _decode_segments(split[index], template)
        ]
        assert len(split_texts) == len(set(split_texts))
        texts += split_texts
    assert sorted(texts) == sorted(template.render(conversation) for conversation in conversations)
    assert splits[0] is not None and splits[0].order.epochs(0) == {"c.jsonl": 0.0}


def _decode_segments(sample: dict[str, np.ndarray], template: ChatTemplate) -> list[str]:
    segments = sample["segments"]
    return [
        template.tokenizer.decode(sample["text"][segments == segment].tolist()) for segment in range(segments.max() + 1)
    ]


def test_validation_file_is_separate_and_train_files_are_blended(tmp_path: Path, template: ChatTemplate) -> None:
    first = write_conversations(tmp_path / "a.jsonl", CONVERSATIONS)
    second = write_conversations(tmp_path / "b.jsonl", [make_messages("x", "y")])
    paths = BlendPaths(train_data_path=f"3 {first} 1 {second}", valid_data_path=str(second))
    train, valid, test = build_sft_train_valid_test(
        paths, seq_length=200, seed=3, template=template, needed=(True, True, False)
    )
    assert train is not None and valid is not None and test is None
    assert train.order.cursors(40) == {"a.jsonl": 30, "b.jsonl": 10}
    assert _decode_segments(valid[0], template) == [template.render(make_messages("x", "y"))]


def test_micro_batches_resume_mid_epoch(tmp_path: Path, template: ChatTemplate) -> None:
    file = open_conversations(write_conversations(tmp_path / "c.jsonl", CONVERSATIONS * 9), template, 101)
    dataset = make_dataset(file, 100)
    assert dataset.samples_per_epoch > 7

    def read_batches(start: int, count: int) -> list[dict[str, torch.Tensor]]:
        loader = DataLoader(
            dataset, micro_batch_size=1, num_micro_batches=2, data_rank=0, data_size=1, samples_consumed=start
        )
        iterator = iter(loader)
        return [next(iterator) for _ in range(count)]

    batches_from_start, resumed_batches = read_batches(0, 12), read_batches(6, 6)
    for expected, resumed in zip(batches_from_start[6:], resumed_batches, strict=True):
        assert set(expected) == {"text", "segments", "loss_mask"}
        assert all(torch.equal(expected[key], resumed[key]) for key in expected)
    assert all(bool(batch["loss_mask"].any()) for batch in batches_from_start)


def test_escaped_unicode_is_decoded(tmp_path: Path, template: ChatTemplate) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": CONVERSATIONS[2]}, ensure_ascii=True) + "\r\n")
    assert template.tokenizer.decode(np.abs(open_conversations(path, template).read(0)[:10]).tolist()).startswith(
        "<|im_start|>"
    )
