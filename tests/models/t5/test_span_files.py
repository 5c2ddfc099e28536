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
from tests.data.test_build import only
from tests.models.t5.span_set import VOCAB_SIZE, Cut, counting, write_pair, write_set

TOKENS = T5Tokens.appended(VOCAB_SIZE, 12, 0)
SIZES = [(5, 2, 6, 1, 4, 3), (9, 4), (1, 1, 1, 1, 1, 1), (30, 2, 20, 5), (7, 3, 8, 2)]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_set(tmp_path / "a", counting(SIZES))
    return tmp_path / "a"


def samples_of(prefix: Path, **changed: Any) -> SpanFilesDataset:
    values = {"documents": (0, len(SIZES)), "enc_seq_length": 16, "dec_seq_length": 24, "tokens": TOKENS, "seed": 3}
    return SpanFilesDataset(SpanFiles(str(prefix), VOCAB_SIZE), **{**values, **changed})


def reference(prefix: Path, index: int, is_apart: bool) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return inputs, targets and their documents as a loop over tokens finds them."""
    files = SpanFiles(str(prefix), VOCAB_SIZE)
    windows = SampleIndex(files.context, documents=(0, len(SIZES)), length=15, overlap=0, seed=3, asked_by="a test")
    documents = counting(SIZES)
    inputs, targets, of_inputs, of_targets = [], [], [], []
    next_sentinel = 0
    for number, piece in enumerate(windows.pieces(index)):
        segment = number if is_apart else 0
        next_sentinel = 0 if is_apart else next_sentinel
        for token in files.context.read(*piece).tolist():
            if token >= VOCAB_SIZE:
                span = documents[piece.document].spans[token - VOCAB_SIZE]
                token = TOKENS.sentinels[next_sentinel]
                next_sentinel += 1
                targets += [token, *span]
                of_targets += [segment] * (len(span) + 1)
            inputs.append(token)
            of_inputs.append(segment)
    return [*inputs, 0], [*targets, 0], [*of_inputs, of_inputs[-1]], [*of_targets, of_inputs[-1]]


@pytest.mark.parametrize("is_apart", [False, True])
def test_samples_equal_a_loop_over_tokens(prefix: Path, is_apart: bool) -> None:
    samples = samples_of(prefix, reset_attention_mask=is_apart)
    contexts = sum(sum(sizes[::2]) + len(sizes) // 2 for sizes in SIZES)
    assert samples.samples_per_epoch == contexts // 15
    for index in range(3 * samples.samples_per_epoch):
        sample = samples[index]
        inputs, targets, of_inputs, of_targets = reference(prefix, index, is_apart)
        rest = 24 - len(targets)
        assert rest > 0 and sample["inputs"].tolist() == inputs and sample["enc_segments"].tolist() == of_inputs
        assert sample["targets"].tolist() == targets + [0] * rest
        assert sample["dec_segments"].tolist() == of_targets + [-1] * rest


def test_targets_that_are_too_long_are_cut_and_counted(prefix: Path, monkeypatch: MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "info", said.append)
    whole = samples_of(prefix)
    longest = max(int((whole[index]["dec_segments"] >= 0).sum()) for index in range(6))
    assert not said
    cut = samples_of(prefix, dec_seq_length=longest - 1)
    assert f"more than --dec-seq-length {longest - 1} target tokens, up to {longest};" in said[0]
    for index in range(6):
        assert cut[index]["targets"].tolist() == whole[index]["targets"][: longest - 1].tolist()


def test_places_beyond_16_bits_are_found(tmp_path: Path) -> None:
    spans = [[1] * 40_000, [2] * 3, [3] * 40_000, [4] * 5]
    write_set(tmp_path / "a", [Cut([[9]] * 4, spans)])
    files = SpanFiles(str(tmp_path / "a"), VOCAB_SIZE)
    for number, span in enumerate(spans):
        assert files.read(0, number, 1).tolist() == [VOCAB_SIZE + number, *span]
    assert len(files.read(0, 0, 4)) == 80_012


def edit(prefix: Path, suffix: str, place: int, number: int) -> None:
    path = Path(f"{prefix}{suffix}.bin")
    numbers = np.fromfile(path, "<u2")
    numbers[place] = number
    numbers.tofile(path)


@pytest.mark.parametrize(
    "suffix, place, number, text",
    [
        ("_context", 5, 1002, "markers of document 0 are not consecutive"),
        ("_context", 5, 1020, "document 0 .* token 5 of a_context.bin is 1020, which is above all markers"),
        ("_target", 0, 7, "must start with the marker 1000, .* got .7. in document 0. Use the tokenizer"),
        ("_target", 3, 7, "document 0 .* spans 0 ... 2 do not all start with their markers"),
        ("_target_offset", 1, 4, "document 0 .* its 3 spans are not contiguous"),
        ("_target_offset", 5, 5, "document 0 .* its target has 9 tokens, but its spans need 10"),
    ],
)
def test_a_damaged_set_is_refused(prefix: Path, suffix: str, place: int, number: int, text: str) -> None:
    edit(prefix, suffix, place, number)
    with pytest.raises(DataError, match=text):
        samples = samples_of(prefix, documents=(0, 1), enc_seq_length=19)
        samples[0]


def test_files_of_different_sets_are_refused(prefix: Path) -> None:
    write_pair(Path(f"{prefix}_target_offset"), [[0, 3, 3, 2, 5, 4]])
    with pytest.raises(DataError, match="same number of .* got 5 in _context, 5 in _target, 1 in _target_offset"):
        samples_of(prefix)
    write_pair(Path(f"{prefix}_target_offset"), [[0, 3, 3, 2, 5]] * 5)
    with pytest.raises(DataError, match="document 0 .* 5 offsets do not form pairs"):
        samples_of(prefix)


def test_another_vocabulary_is_refused(prefix: Path) -> None:
    with pytest.raises(DataError, match="must start with the marker 1001, .* got .1000. in document 0"):
        SpanFiles(str(prefix), VOCAB_SIZE + 1)


def test_markers_that_16_bits_cannot_hold_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path / "a", counting([(1, 1, 1, 1, 1, 1)]), vocab_size=65_534)
    with pytest.raises(DataError, match="document 0 .* uint16 cannot represent the markers of 3 spans"):
        SpanFiles(str(tmp_path / "a"), 65_534)


def build(prefix: Path, **changed: Any) -> Any:
    values = {
        "enc_seq_length": 16,
        "dec_seq_length": 24,
        "denoisers": parse_denoisers("R", 0.15, 3),
        "tokens": TOKENS,
        "seed": 3,
        "needed": (True, False, False),
    }
    paths = BlendPaths(data_path=str(prefix), split="1")
    return build_t5_train_valid_test(paths, **{**values, **changed})  # type: ignore[arg-type]


def test_a_set_opens_where_no_ordinary_pair_is(prefix: Path) -> None:
    train, valid, _ = build(prefix)
    assert isinstance(only(train), SpanFilesDataset) and valid is None and train[0]["inputs"].shape == (16,)
    with pytest.raises(DataError, match="--denoisers must be one denoiser for .* got R,S"):
        build(prefix, denoisers=parse_denoisers("R,S", 0.15, 3))
    with pytest.raises(DataError, match="too few sentinels: --vocab-extra-ids gives 2"):
        build(prefix, tokens=T5Tokens.appended(VOCAB_SIZE, 2, 0))
    with pytest.raises(DataError, match="has 103 tokens in total, but one sample of .* needs 199"):
        build(prefix, enc_seq_length=200)
    Path(f"{prefix}_target.bin").unlink()
    with pytest.raises(DataError, match="a_target.bin does not exist; a set in three files is _context, _target"):
        build(prefix)


def test_fingerprint_changes_with_all_that_changes_a_sample(prefix: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"documents": (0, 4)},
        {"enc_seq_length": 17},
        {"dec_seq_length": 25},
        {"seed": 4},
        {"tokens": T5Tokens.appended(VOCAB_SIZE, 13, 0)},
        {"reset_attention_mask": True},
    ]
    prints = [samples_of(prefix, **change).fingerprint for change in changes]
    edit(prefix, "_target", 1, 9)
    assert len({*prints, samples_of(prefix).fingerprint}) == len(prints) + 1
