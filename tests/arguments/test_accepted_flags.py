"""Flags of Megatron's scripts and of its forks that have no effect, or a name or a form of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.arguments import parse
from megatron.arguments.other_programs import GPT
from megatron.config import Config
from megatron.errors import ConfigError

EXPERT_FLAGS = "--num-experts 4 --moe-router-score-function sigmoid"


def parse_line(line: str, **kwargs) -> Config:
    return parse(line.split(), world_size=1, env=kwargs.pop("env", {}), **kwargs)


@pytest.mark.parametrize(
    ("base", "flag", "expected"),
    [
        (EXPERT_FLAGS, "--moe-router-pre-softmax", "--moe-router-pre-softmax"),
        ("--position-embedding-type rope", "--rotary-scaling-factor 40", "--rotary-scaling-factor 40"),
        ("", "--no-load-optim", "--no-load-optim"),
        ("", "--no-load-rng", "--no-load-rng"),
        ("--bf16", "--initial-loss-scale 1000", "--initial-loss-scale 1000.0"),
        ("", "--error-injection-rate 5", "--error-injection-rate"),
        ("", "--disable-bf16-reduced-precision-matmul", "--disable-bf16-reduced-precision-matmul"),
        ("", "--main-grads-dtype bf16", "--main-grads-dtype"),
        ("", "--attention-head-type multihead", "--attention-head-type multihead"),
        ("", "--use-fused-rmsnorm", "--use-fused-rmsnorm"),
        ("", "--use-fused-swiglu true", "--use-fused-swiglu"),
        (f"--tokenizer-path {__file__}", "--tokenizer-type TikTokenizer", "--tokenizer-type TikTokenizer"),
    ],
)
def test_ignored_flag_is_listed_and_keeps_namespace(base: str, flag: str, expected: str) -> None:
    config = parse_line(f"{base} {flag}")
    assert list(config.ignored) == [expected]
    assert config.namespace() == parse_line(base).namespace()
    with pytest.raises(ConfigError, match="is rejected by --strict-flags"):
        parse_line(f"{base} {flag} --strict-flags")


@pytest.mark.parametrize("line", ["--fp16 --initial-loss-scale 1000", "--initial-loss-scale 1000"])
def test_initial_loss_scale_must_be_power_of_two(line: str) -> None:
    with pytest.raises(ConfigError, match="^--initial-loss-scale must be a power of 2, got 1000"):
        parse_line(line)


def test_interval_zero_disables_exit_and_logging() -> None:
    config = parse_line("--exit-interval 0 --log-interval 0")
    assert (config.run.exit_interval, config.run.log_interval) == (0, 0)


def test_pretrain_gpt_notes_global_batch_load_balancing_loss() -> None:
    line = "--num-experts 4 --moe-aux-loss-coeff 0.01 --disable-bias-linear"
    note = "the load-balancing loss aux_loss uses the experts' shares of the previous global batch"
    assert [text for text in parse_line(line, defaults=GPT).notes if note in text]
    assert not [text for text in parse_line(line).notes if note in text]


@pytest.mark.parametrize(
    ("fork_line", "expected_line"),
    [
        ("--num_layers 2 --hidden_size=32", "--num-layers 2 --hidden-size 32"),
        ("--train_samples 40", "--train-samples 40"),
        ("--attention-head-type multiquery", "--num-query-groups 1"),
        ("--attention-head-type multiquery --num-query-groups 2", "--num-query-groups 2"),
        ("--use-z-loss", "--z-loss 1e-4"),
        ("--use-z-loss --z-loss 0.5", "--z-loss 0.5"),
        ("--lr-decay-style wsd --lr-wsd-decay-style 1-sqrt", "--lr-decay-style wsd --lr-wsd-decay-style minus_sqrt"),
        (f"--tokenizer-file {__file__}", f"--tokenizer-path {__file__}"),
    ],
)
def test_fork_flag_name_sets_field(fork_line: str, expected_line: str) -> None:
    assert parse_line(fork_line).namespace() == parse_line(expected_line).namespace()


def test_unknown_tokenizer_type_raises() -> None:
    for settings in (
        {"line": "--tokenizer-type Foo"},
        {"line": "", "env": {"MEGATRON_DEFAULTS": "--tokenizer-type Foo"}},
    ):
        with pytest.raises(ConfigError, match="^--tokenizer-type must be one of .* got 'Foo'"):
            parse_line(**settings)


@pytest.mark.parametrize(
    ("file_sizes", "expected"), [((30, 10), "30 {0} 10 {1}"), ((30, None), "1 {0} 1 {1}"), ((0, 10), "1 {0} 1 {1}")]
)
def test_paths_without_weights_are_weighted_by_size(file_sizes, expected: str, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    for path, size in zip(paths, file_sizes, strict=True):
        if size is not None:
            Path(f"{path}.bin").write_bytes(bytes(size))
    config = parse_line(f"--data-path {' '.join(paths)} --dry-run")
    assert config.data.data_path == expected.format(*paths)
    (note,) = [note for note in config.notes if note.startswith("paths without weights are weighted")]
    assert (f": {paths[0]} 75.0%, {paths[1]} 25.0%" in note) == (file_sizes == (30, 10))
