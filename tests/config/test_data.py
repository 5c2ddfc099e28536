"""Corpora, their weights and splits, and the ramp of the batch, as flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron import tokenizer
from megatron.config import Config, parse
from megatron.config.data import TOKENIZERS
from megatron.config.data_paths import parse_paths
from megatron.errors import ConfigError


def read(*words: str, world_size: int = 1, defaults: str = "", family: str = "gpt2") -> Config:
    return parse(words, world_size=world_size, env={"MEGATRON_DEFAULTS": defaults}, family=family)


def error_of(*words: str, **others) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*words, **others)
    return str(caught.value)


@pytest.fixture
def corpora(tmp_path: Path) -> list[str]:
    """Return the prefixes of two corpora, the second with a space in its path."""
    prefixes = [str(tmp_path / "a"), str(tmp_path / "b c")]
    for prefix in prefixes:
        for suffix in (".idx", ".bin"):
            Path(prefix + suffix).touch()
    return prefixes


def test_the_kinds_of_tokenizers_are_those_that_can_be_built() -> None:
    assert tokenizer.TYPES == TOKENIZERS


def test_many_words_and_one_quoted_word_are_the_same_text(corpora: list[str]) -> None:
    a, b = corpora
    many = read("--data-path", "0.7", a, "0.3", b, "--seed", "5")
    one = read("--data-path", f"0.7 {a} 0.3 '{b}'", "--seed", "5")
    other = read(f"--data-path=0.7 {a} 0.3 '{b}'", "--seed", "5")
    soft = read("--seed", "5", defaults=f"--data-path 0.7 {a} 0.3 '{b}'")
    for config in (many, one, other, soft):
        assert config.data.data_path == many.data.data_path == config.namespace().data_path
        assert parse_paths(config.data.data_path) == ((0.7, a), (0.3, b))
        assert config.run.seed == 5
    assert parse_paths(read("--data-path", b).data.data_path) == ((1.0, b),), "a path with a space, as ever"
    assert read("--data-path", a).namespace().data_path == a


def test_a_path_for_each_split_takes_the_place_of_the_recipes(corpora: list[str]) -> None:
    a, b = corpora
    recipe = f"--data-path '{b}' --split 900,50,50"
    config = read("--train-data-path", a, "--valid-data-path", b, "--test-data-path", b, defaults=recipe)
    assert (config.data.data_path, config.data.train_data_path, config.data.training_path) == (None, a, a)
    assert config.data.split == "949,50,1"
    back = read("--data-path", a, defaults=f"--train-data-path {a} --valid-data-path '{b}'").data
    assert (back.data_path, back.train_data_path, back.valid_data_path) == (a, None, None)


def test_all_that_is_wrong_with_corpora_is_told_at_once(corpora: list[str], tmp_path: Path) -> None:
    a, _ = corpora
    gone = str(tmp_path / "gone")
    words = ["--data-path", "0.7", a, "0.3", gone, "--train-data-path", "1", a, "--mixture-schedule", "5: 1"]
    message = error_of(*words, "--tokenizer-type", "BPE", "--num-workers", "1", "--test-data-path", "x", "0.5", a)
    for part in (
        f"--data-path must name token files that can be read, got --data-path {gone}, but cannot read {gone}.idx and",
        "--data-path, which --split divides into three splits, excludes --train-data-path, --test-data-path",
        "--test-data-path must be one path, or alternating weights and paths",
        "--mixture-schedule needs several corpora",
    ):
        assert part in message
    assert "--tokenizer-type must be one of" in message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--mixture-schedule 5:1", "--mixture-schedule needs several corpora, got one"),
        ("--split-by list", "--split-by must be one of range, hash"),
        ("--packing best", "--packing must be one of concat, best-fit"),
        ("--fim-rate 1.5", "--fim-rate must be a finite number of at least 0 and at most 1"),
        ("--fim-spm-rate 1", "--fim-spm-rate has no effect without --fim-rate"),
        ("--prefetch-factor 3", "--prefetch-factor has no effect without --num-workers"),
        ("--allow-data-change", "--allow-data-change needs a checkpoint"),
        ("--load x --allow-data-change --finetune", "--allow-data-change has no effect with --finetune"),
        ("--load x --allow-data-change --eval-only", "--allow-data-change has no effect with --eval-only"),
        ("--data-path", "--data-path needs a value"),
    ],
)
def test_what_cannot_be_or_act_is_told(words: str, said: str, corpora: list[str]) -> None:
    assert said in error_of("--data-path", corpora[0], *words.split())


def test_a_split_that_nothing_reads_is_told(corpora: list[str]) -> None:
    assert "--split applies to --data-path only" in error_of("--train-data-path", corpora[0], "--split", "1,1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--train-data-path {a}",
            "got --train-data-path without --valid-data-path and --test-data-path. Add them too",
        ),
        ("--train-data-path {a} --eval-interval 0", "without --test-data-path. Add it too, or disable evaluation"),
        ("--valid-data-path {a} --eval-iters 0", "without --train-data-path. Add it too, or use --data-path"),
        ("--train-data-path {a} --eval-only --load x", "without --test-data-path. Add it too"),
    ],
)
def test_paths_that_are_missing_beside_others_are_told_at_once(words: str, said: str, corpora: list[str]) -> None:
    assert said in error_of(*words.format(a=corpora[0]).split())


def test_paths_of_splits_that_are_not_read_are_noted(corpora: list[str]) -> None:
    each = [word for name in ("train", "valid", "test") for word in (f"--{name}-data-path", corpora[0])]
    for words, unread in (
        ((), ()),
        (("--eval-interval", "0"), ("valid",)),
        (("--eval-iters", "0"), ("valid", "test")),
        (("--train-iters", "0"), ("train",)),
        (("--eval-only", "--load", "x"), ("train", "valid")),
    ):
        message = (
            ", ".join(f"--{name}-data-path" for name in unread) + " has no effect: this run does not read these splits"
        )
        assert [note for note in read(*each, *words).notes if "-data-path" in note] == ([message] if unread else [])


@pytest.mark.parametrize(
    "flag",
    [
        "--split 1",
        "--split-by hash",
        "--data-impl pread",
        "--data-cache-path x",
        "--packing best-fit",
        "--fim-rate 0.5",
    ],
)
def test_flags_of_token_files_cannot_act_on_data_of_ones_own(flag: str) -> None:
    assert f"{flag.split()[0]} applies to token files only, got --data-path none" in error_of(
        "--data-path", "none", *flag.split()
    )
    assert read("--data-path", "none", defaults=flag).data.is_own, "a recipe may say so"


def test_a_schedule_needs_corpora_and_tokens_that_are_reached(corpora: list[str]) -> None:
    a, b = corpora
    assert "got no --data-path" in error_of("--mixture-schedule", "5: 1 1")
    mixture = ("--data-path", "1", a, "1", b, "--seq-length", "10", "--train-iters", "5", "--batch-size", "2")
    for schedule, late in (("381: 1 2; 390: 1 1", ""), ("5: 1 0; 391: 0 1; 4e2: 1 1", "391, 400")):
        notes = read(*mixture, "--gas", "2", "--mixture-schedule", schedule, world_size=2).notes
        message = f"the run ends after 400 tokens, so the weights from {late} on have no effect"
        assert [message in note for note in notes if "schedule" in note] == ([True] if late else []), notes


def test_a_path_with_a_space_that_reads_as_a_weight_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("2 files", "files"):
        for suffix in (".idx", ".bin"):
            Path(name + suffix).touch()
    said = "--data-path 2 files is parsed as the weight 2 and the path files, but token files 2 files exist."
    assert said in error_of("--data-path", "2 files")
    assert """Write --data-path "1 '2 files'" to use them, or remove the weight""" in error_of(
        "--data-path", "2", "files"
    )
    assert list(read("--data-path", "1 '2 files'").data.flag_of_prefix) == ["2 files"]
    Path("2 files.idx").unlink()
    assert list(read("--data-path", "2 files").data.flag_of_prefix) == ["files"]


def test_flags_of_gpt2_alone_are_refused_by_t5() -> None:
    for words in (("--packing", "concat"), ("--fim-rate", "0.1"), ("--fim-spm-rate", "1")):
        assert f"{words[0]} is not supported: T5" in error_of(*words, family="t5")


def test_documents_are_apart_with_the_mask_or_with_best_fit() -> None:
    for words, apart in (((), False), (("--reset-attention-mask",), True), (("--packing", "best-fit"), True)):
        assert read(*words).data.keeps_documents_apart is apart


def test_a_ramp_of_the_batch_is_checked_size_by_size() -> None:
    ramp = ("--batch-size", "2", "--gas", "4", "--rampup-batch-size", "4", "4", "100")
    sizes = read(*ramp, world_size=2).batch.sizes(2)
    assert sizes.all() == [4, 8, 12, 16] and sizes.samples == 100
    assert read("--global-batch-size", "16", *ramp[:2], *ramp[4:], world_size=2).batch.sizes(2) == sizes
    assert read("--rampup-batch-size=4 4 100", *ramp[:4], world_size=2).batch.sizes(2) == sizes
    message = error_of(*ramp, world_size=4)
    assert "must be a multiple of micro-batch x replicas = 2 x 4 = 8, got 4, 12, 20, 28 among 4, 8, 12" in message
    assert "must start below the global batch" in error_of(*ramp[:4], "--rampup-batch-size", "8", "2", "9")
    assert "START INCREMENT SAMPLES" in error_of("--rampup-batch-size", "8")


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ("--data-path {0}", 0),
        ("--data-path 0.3 {0} 0.7 s3://bucket/b", 1),
        ("--train-data-path memory://b --valid-data-path {0}", 1),
        ("--data-path s3://bucket/b --num-workers 3", 3),
    ],
)
def test_a_process_of_its_own_fetches_from_a_store(given: str, number: int, corpora: list[str]) -> None:
    assert read(*given.format(corpora[0]).split()).data.reading_processes == number
