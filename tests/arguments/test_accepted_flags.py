"""Flags of Megatron's scripts and of its forks that have no effect, or a name or a form of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.arguments import parse
from megatron.arguments.other_programs import GPT
from megatron.config import Config
from megatron.errors import ConfigError

EXPERTS = "--num-experts 4 --moe-router-score-function sigmoid"


def read(line: str, **settings) -> Config:
    return parse(line.split(), world_size=1, env=settings.pop("env", {}), **settings)


@pytest.mark.parametrize(
    ("base", "flag", "listed"),
    [
        (EXPERTS, "--moe-router-pre-softmax", "--moe-router-pre-softmax"),
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
def test_a_flag_without_effect_is_listed_and_changes_nothing(base: str, flag: str, listed: str) -> None:
    config = read(f"{base} {flag}")
    assert list(config.ignored) == [listed]
    assert config.namespace() == read(base).namespace()
    with pytest.raises(ConfigError, match="is rejected by --strict-flags"):
        read(f"{base} {flag} --strict-flags")


@pytest.mark.parametrize("line", ["--fp16 --initial-loss-scale 1000", "--initial-loss-scale 1000"])
def test_a_loss_scale_of_fp16_must_be_a_power_of_two(line: str) -> None:
    with pytest.raises(ConfigError, match="^--initial-loss-scale must be a power of 2, got 1000"):
        read(line)


def test_an_interval_of_zero_disables_the_exit_and_the_lines_between_first_and_last_step() -> None:
    config = read("--exit-interval 0 --log-interval 0")
    assert (config.run.exit_interval, config.run.log_interval) == (0, 0)


def test_megatrons_program_reports_the_scope_of_the_load_balancing_loss() -> None:
    line = "--num-experts 4 --moe-aux-loss-coeff 0.01 --disable-bias-linear"
    note = "the load-balancing loss of the experts is computed over the global batch"
    assert [text for text in read(line, defaults=GPT).notes if note in text]
    assert not [text for text in read(line).notes if note in text]


@pytest.mark.parametrize(
    ("theirs", "ours"),
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
def test_a_name_of_a_fork_sets_our_field(theirs: str, ours: str) -> None:
    assert read(theirs).namespace() == read(ours).namespace()


def test_an_unknown_tokenizer_type_needs_a_path() -> None:
    for settings in (
        {"line": "--tokenizer-type Foo"},
        {"line": "", "env": {"MEGATRON_DEFAULTS": "--tokenizer-type Foo"}},
    ):
        with pytest.raises(ConfigError, match="^--tokenizer-type must be one of .* got 'Foo'"):
            read(**settings)


@pytest.mark.parametrize(
    ("sizes", "weights"), [((30, 10), "30 {0} 10 {1}"), ((30, None), "1 {0} 1 {1}"), ((0, 10), "1 {0} 1 {1}")]
)
def test_paths_without_weights_are_mixed_by_size(sizes, weights: str, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    for path, size in zip(paths, sizes, strict=True):
        if size is not None:
            Path(f"{path}.bin").write_bytes(bytes(size))
    config = read(f"--data-path {' '.join(paths)} --dry-run")
    assert config.data.data_path == weights.format(*paths)
    (note,) = [note for note in config.notes if note.startswith("paths without weights are weighted")]
    assert (f": {paths[0]} 75.0%, {paths[1]} 25.0%" in note) == (sizes == (30, 10))
