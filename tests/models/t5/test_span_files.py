from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest import MonkeyPatch

from megatron import log
from megatron.data import BlendPaths
from megatron.data.sample_index import SampleIndex
from megatron.errors import DataError
from megatron.models.t5.data import T5Tokens
from megatron.models.t5.span_files import SpanFiles, SpanFilesDataset, build_t5_train_valid_test
from megatron.models.t5.spans import parse_denoisers
from tests.data.test_build import single_corpus
from tests.models.t5.span_set import VOCAB_SIZE, CorruptedDocument, make_counting_documents, write_pair, write_set

TOKENS = T5Tokens.appended(VOCAB_SIZE, 12, 0)
RUN_LENGTHS = [(5, 2, 6, 1, 4, 3), (9, 4), (1, 1, 1, 1, 1, 1), (30, 2, 20, 5), (7, 3, 8, 2)]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_set(tmp_path / "a", make_counting_documents(RUN_LENGTHS))
    return tmp_path / "a"


def make_samples(prefix: Path, **overrides: Any) -> SpanFilesDataset:
    values = {
        "documents": (0, len(RUN_LENGTHS)),
        "enc_seq_length": 16,
        "dec_seq_length": 24,
        "tokens": TOKENS,
        "seed": 3,
    }
    return SpanFilesDataset(SpanFiles(str(prefix), VOCAB_SIZE), **{**values, **overrides})


def loop_sample(prefix: Path, index: int, resets_mask: bool) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return inputs, targets and their documents as a loop over tokens finds them."""
    files = SpanFiles(str(prefix), VOCAB_SIZE)
    windows = SampleIndex(
        files.context, documents=(0, len(RUN_LENGTHS)), length=15, overlap=0, seed=3, length_flag="a test"
    )
    documents = make_counting_documents(RUN_LENGTHS)
    inputs, targets, input_documents, target_documents = [], [], [], []
    next_sentinel = 0
    for segment_idx, document_run in enumerate(windows.slices(index)):
        segment = segment_idx if resets_mask else 0
        next_sentinel = 0 if resets_mask else next_sentinel
        for token in files.context.read(*document_run).tolist():
            if token >= VOCAB_SIZE:
                span = documents[document_run.document].spans[token - VOCAB_SIZE]
                token = TOKENS.sentinels[next_sentinel]
                next_sentinel += 1
                targets += [token, *span]
                target_documents += [segment] * (len(span) + 1)
            inputs.append(token)
            input_documents.append(segment)
    return (
        [*inputs, 0],
        [*targets, 0],
        [*input_documents, input_documents[-1]],
        [*target_documents, input_documents[-1]],
    )


@pytest.mark.parametrize("resets_mask", [False, True])
def test_samples_match_loop_over_tokens(prefix: Path, resets_mask: bool) -> None:
    samples = make_samples(prefix, reset_attention_mask=resets_mask)
    contexts = sum(sum(lengths[::2]) + len(lengths) // 2 for lengths in RUN_LENGTHS)
    assert samples.samples_per_epoch == contexts // 15
    for index in range(3 * samples.samples_per_epoch):
        sample = samples[index]
        inputs, targets, input_documents, target_documents = loop_sample(prefix, index, resets_mask)
        num_padding = 24 - len(targets)
        assert (
            num_padding > 0
            and sample["inputs"].tolist() == inputs
            and sample["enc_segments"].tolist() == input_documents
        )
        assert sample["targets"].tolist() == targets + [0] * num_padding
        assert sample["dec_segments"].tolist() == target_documents + [-1] * num_padding


def test_long_targets_are_truncated_and_logged(prefix: Path, monkeypatch: MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(log, "info", messages.append)
    full_samples = make_samples(prefix)
    max_target = max(int((full_samples[index]["dec_segments"] >= 0).sum()) for index in range(6))
    assert not messages
    truncated = make_samples(prefix, dec_seq_length=max_target - 1)
    assert f"more than --dec-seq-length {max_target - 1} target tokens, up to {max_target};" in messages[0]
    for index in range(6):
        assert truncated[index]["targets"].tolist() == full_samples[index]["targets"][: max_target - 1].tolist()


def test_offsets_beyond_16_bits_are_read(tmp_path: Path) -> None:
    spans = [[1] * 40_000, [2] * 3, [3] * 40_000, [4] * 5]
    write_set(tmp_path / "a", [CorruptedDocument([[9]] * 4, spans)])
    files = SpanFiles(str(tmp_path / "a"), VOCAB_SIZE)
    for span_idx, span in enumerate(spans):
        assert files.read(0, span_idx, 1).tolist() == [VOCAB_SIZE + span_idx, *span]
    assert len(files.read(0, 0, 4)) == 80_012


def edit_value(prefix: Path, suffix: str, position: int, value: int) -> None:
    path = Path(f"{prefix}{suffix}.bin")
    values = np.fromfile(path, "<u2")
    values[position] = value
    values.tofile(path)


@pytest.mark.parametrize(
    "suffix, position, value, text",
    [
        ("_context", 5, 1002, "markers of document 0 are not consecutive"),
        ("_context", 5, 1020, "document 0 .* token 5 of a_context.bin is 1020, which is above all markers"),
        ("_target", 0, 7, "must start with the marker 1000, .* got .7. in document 0. Use the tokenizer"),
        ("_target", 3, 7, "document 0 .* spans 0 ... 2 do not all start with their markers"),
        ("_target_offset", 1, 4, "document 0 .* its 3 spans are not contiguous"),
        ("_target_offset", 5, 5, "document 0 .* its target has 9 tokens, but its spans need 10"),
    ],
)
def test_rejects_damaged_span_set(prefix: Path, suffix: str, position: int, value: int, text: str) -> None:
    edit_value(prefix, suffix, position, value)
    with pytest.raises(DataError, match=text):
        samples = make_samples(prefix, documents=(0, 1), enc_seq_length=19)
        samples[0]


def test_rejects_files_of_different_sets(prefix: Path) -> None:
    write_pair(Path(f"{prefix}_target_offset"), [[0, 3, 3, 2, 5, 4]])
    with pytest.raises(DataError, match="same number of .* got 5 in _context, 5 in _target, 1 in _target_offset"):
        make_samples(prefix)
    write_pair(Path(f"{prefix}_target_offset"), [[0, 3, 3, 2, 5]] * 5)
    with pytest.raises(DataError, match="document 0 .* 5 offsets do not form pairs"):
        make_samples(prefix)


def test_rejects_other_vocabulary(prefix: Path) -> None:
    with pytest.raises(DataError, match="must start with the marker 1001, .* got .1000. in document 0"):
        SpanFiles(str(prefix), VOCAB_SIZE + 1)


def test_rejects_markers_beyond_16_bits(tmp_path: Path) -> None:
    write_set(tmp_path / "a", make_counting_documents([(1, 1, 1, 1, 1, 1)]), vocab_size=65_534)
    with pytest.raises(DataError, match="document 0 .* uint16 cannot represent the markers of 3 spans"):
        SpanFiles(str(tmp_path / "a"), 65_534)


def build_splits(prefix: Path, **overrides: Any) -> Any:
    values = {
        "enc_seq_length": 16,
        "dec_seq_length": 24,
        "denoisers": parse_denoisers("R", 0.15, 3),
        "tokens": TOKENS,
        "seed": 3,
        "needed": (True, False, False),
    }
    paths = BlendPaths(data_path=str(prefix), split="1")
    return build_t5_train_valid_test(paths, **{**values, **overrides})  # type: ignore[arg-type]


def test_span_set_opens_without_ordinary_pair(prefix: Path) -> None:
    train, valid, _ = build_splits(prefix)
    assert isinstance(single_corpus(train), SpanFilesDataset) and valid is None and train[0]["inputs"].shape == (16,)
    with pytest.raises(DataError, match="--denoisers must be one denoiser for .* got R,S"):
        build_splits(prefix, denoisers=parse_denoisers("R,S", 0.15, 3))
    with pytest.raises(DataError, match="--vocab-extra-ids provides 2"):
        build_splits(prefix, tokens=T5Tokens.appended(VOCAB_SIZE, 2, 0))
    with pytest.raises(DataError, match="has 103 tokens in total, but one sample of .* needs 199"):
        build_splits(prefix, enc_seq_length=200)
    Path(f"{prefix}_target.bin").unlink()
    with pytest.raises(DataError, match="a_target.bin does not exist; a three-file set is _context, _target"):
        build_splits(prefix)


def test_fingerprint_depends_on_every_setting(prefix: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"documents": (0, 4)},
        {"enc_seq_length": 17},
        {"dec_seq_length": 25},
        {"seed": 4},
        {"tokens": T5Tokens.appended(VOCAB_SIZE, 13, 0)},
        {"reset_attention_mask": True},
    ]
    fingerprints = [make_samples(prefix, **change).fingerprint for change in changes]
    edit_value(prefix, "_target", 1, 9)
    assert len({*fingerprints, make_samples(prefix).fingerprint}) == len(fingerprints) + 1
