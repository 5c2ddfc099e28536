"""Corpora, their weights and splits, and the ramp of the batch, as flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron import tokenizer
from megatron.config import Config, parse
from megatron.config.data import TOKENIZERS
from megatron.config.data_paths import parse_paths
from megatron.errors import ConfigError


def parse_words(*words: str, world_size: int = 1, defaults: str = "", family: str = "gpt2") -> Config:
    return parse(words, world_size=world_size, env={"MEGATRON_DEFAULTS": defaults}, family=family)


def error_message(*words: str, **kwargs) -> str:
    with pytest.raises(ConfigError) as exc_info:
        parse_words(*words, **kwargs)
    return str(exc_info.value)


@pytest.fixture
def corpora(tmp_path: Path) -> list[str]:
    """Return the prefixes of two corpora, the second with a space in its path."""
    prefixes = [str(tmp_path / "a"), str(tmp_path / "b c")]
    for prefix in prefixes:
        for suffix in (".idx", ".bin"):
            Path(prefix + suffix).touch()
    return prefixes


def test_tokenizer_types_match_buildable_types() -> None:
    assert tokenizer.TYPES == TOKENIZERS


def test_data_path_words_equal_quoted_text(corpora: list[str]) -> None:
    a, b = corpora
    unquoted = parse_words("--data-path", "0.7", a, "0.3", b, "--seed", "5")
    quoted = parse_words("--data-path", f"0.7 {a} 0.3 '{b}'", "--seed", "5")
    joined = parse_words(f"--data-path=0.7 {a} 0.3 '{b}'", "--seed", "5")
    from_defaults = parse_words("--seed", "5", defaults=f"--data-path 0.7 {a} 0.3 '{b}'")
    for config in (unquoted, quoted, joined, from_defaults):
        assert config.data.data_path == unquoted.data.data_path == config.namespace().data_path
        assert parse_paths(config.data.data_path) == ((0.7, a), (0.3, b))
        assert config.run.seed == 5
    assert parse_paths(parse_words("--data-path", b).data.data_path) == ((1.0, b),), "a path with a space, as ever"
    assert parse_words("--data-path", a).namespace().data_path == a


def test_split_paths_replace_recipe_data_path(corpora: list[str]) -> None:
    a, b = corpora
    recipe = f"--data-path '{b}' --split 900,50,50"
    config = parse_words("--train-data-path", a, "--valid-data-path", b, "--test-data-path", b, defaults=recipe)
    assert (config.data.data_path, config.data.train_data_path, config.data.training_path) == (None, a, a)
    assert config.data.split == "949,50,1"
    replaced = parse_words("--data-path", a, defaults=f"--train-data-path {a} --valid-data-path '{b}'").data
    assert (replaced.data_path, replaced.train_data_path, replaced.valid_data_path) == (a, None, None)


def test_all_corpus_problems_are_reported_together(corpora: list[str], tmp_path: Path) -> None:
    a, _ = corpora
    missing = str(tmp_path / "gone")
    words = ["--data-path", "0.7", a, "0.3", missing, "--train-data-path", "1", a, "--mixture-schedule", "5: 1"]
    message = error_message(*words, "--tokenizer-type", "BPE", "--num-workers", "1", "--test-data-path", "x", "0.5", a)
    for fragment in (
        f"--data-path must name token files that can be read, got --data-path {missing}, but cannot read {missing}.idx "
        "and",
        "--data-path, which --split divides into three splits, excludes --train-data-path, --test-data-path",
        "--test-data-path must be one path, or alternating weights and paths",
        "--mixture-schedule needs several corpora",
    ):
        assert fragment in message
    assert "--tokenizer-type must be one of" in message


@pytest.mark.parametrize(
    ("words", "message"),
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
def test_invalid_or_ineffective_flags_raise(words: str, message: str, corpora: list[str]) -> None:
    assert message in error_message("--data-path", corpora[0], *words.split())


def test_split_without_data_path_raises(corpora: list[str]) -> None:
    assert "--split applies to --data-path only" in error_message("--train-data-path", corpora[0], "--split", "1,1")


@pytest.mark.parametrize(
    ("words", "message"),
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
def test_missing_split_paths_raise(words: str, message: str, corpora: list[str]) -> None:
    assert message in error_message(*words.format(a=corpora[0]).split())


def test_unread_split_paths_are_noted(corpora: list[str]) -> None:
    split_flags = [word for name in ("train", "valid", "test") for word in (f"--{name}-data-path", corpora[0])]
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
        assert [note for note in parse_words(*split_flags, *words).notes if "-data-path" in note] == (
            [message] if unread else []
        )


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
def test_token_file_flags_with_custom_data_raise(flag: str) -> None:
    assert f"{flag.split()[0]} applies to token files only, got --data-path none" in error_message(
        "--data-path", "none", *flag.split()
    )
    assert parse_words("--data-path", "none", defaults=flag).data.is_script_data, "a recipe may say so"


def test_mixture_schedule_needs_corpora_and_notes_late_entries(corpora: list[str]) -> None:
    a, b = corpora
    assert "got no --data-path" in error_message("--mixture-schedule", "5: 1 1")
    mixture = ("--data-path", "1", a, "1", b, "--seq-length", "10", "--train-iters", "5", "--batch-size", "2")
    for schedule, late_tokens in (("381: 1 2; 390: 1 1", ""), ("5: 1 0; 391: 0 1; 4e2: 1 1", "391, 400")):
        notes = parse_words(*mixture, "--gas", "2", "--mixture-schedule", schedule, world_size=2).notes
        message = f"the run ends after 400 tokens, so the weights from {late_tokens} on have no effect"
        assert [message in note for note in notes if "schedule" in note] == ([True] if late_tokens else []), notes


def test_path_parsed_as_weight_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("2 files", "files"):
        for suffix in (".idx", ".bin"):
            Path(name + suffix).touch()
    message = "--data-path 2 files is parsed as the weight 2 and the path files, but token files 2 files exist."
    assert message in error_message("--data-path", "2 files")
    assert """Write --data-path "1 '2 files'" to use them, or remove the weight""" in error_message(
        "--data-path", "2", "files"
    )
    assert list(parse_words("--data-path", "1 '2 files'").data.flag_of_prefix) == ["2 files"]
    Path("2 files.idx").unlink()
    assert list(parse_words("--data-path", "2 files").data.flag_of_prefix) == ["files"]


def test_gpt2_data_flags_raise_in_t5() -> None:
    for words in (("--packing", "concat"), ("--fim-rate", "0.1"), ("--fim-spm-rate", "1")):
        assert f"{words[0]} is not supported: T5" in error_message(*words, family="t5")


def test_attention_mask_or_best_fit_separates_documents() -> None:
    for words, is_separated in (((), False), (("--reset-attention-mask",), True), (("--packing", "best-fit"), True)):
        assert parse_words(*words).data.separates_documents is is_separated


def test_rampup_checks_every_batch_size() -> None:
    ramp = ("--batch-size", "2", "--gas", "4", "--rampup-batch-size", "4", "4", "100")
    batch_sizes = parse_words(*ramp, world_size=2).batch.batch_sizes(2)
    assert batch_sizes.all() == [4, 8, 12, 16] and batch_sizes.samples == 100
    assert (
        parse_words("--global-batch-size", "16", *ramp[:2], *ramp[4:], world_size=2).batch.batch_sizes(2) == batch_sizes
    )
    assert parse_words("--rampup-batch-size=4 4 100", *ramp[:4], world_size=2).batch.batch_sizes(2) == batch_sizes
    message = error_message(*ramp, world_size=4)
    assert "must be a multiple of micro-batch x replicas = 2 x 4 = 8, got 4, 12, 20, 28 among 4, 8, 12" in message
    assert "must start below the global batch" in error_message(*ramp[:4], "--rampup-batch-size", "8", "2", "9")
    assert "START INCREMENT SAMPLES" in error_message("--rampup-batch-size", "8")


@pytest.mark.parametrize(
    ("line", "num_processes"),
    [
        ("--data-path {0}", 0),
        ("--data-path 0.3 {0} 0.7 s3://bucket/b", 1),
        ("--train-data-path memory://b --valid-data-path {0}", 1),
        ("--data-path s3://bucket/b --num-workers 3", 3),
    ],
)
def test_object_store_uses_reading_process(line: str, num_processes: int, corpora: list[str]) -> None:
    assert parse_words(*line.format(corpora[0]).split()).data.num_reading_processes == num_processes
