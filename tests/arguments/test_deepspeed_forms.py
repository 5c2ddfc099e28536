"""Forms of DeepSpeed's JSON that published files have: comments, whole floats, schedulers, Muon, unknown keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import engine_dict, parse
from megatron.config import Config
from megatron.config.option import LARGEST_INT
from megatron.errors import ConfigError
from megatron.training.optimizer_setup import make_learning_rate


def read(content: dict[str, Any] | str, folder: Path, line: str = "") -> Config:
    path = folder / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return parse(["--deepspeed_config", str(path), *line.split()], world_size=1, env={})


def test_comments_are_ignored_at_every_level(tmp_path: Path) -> None:
    content = {"_comment": "a run", "gradient_clipping": 0.5, "zero_optimization": {"//": [1], "stage": 0, "#a": {}}}
    config = read(content, tmp_path)
    assert config.ignored == dict.fromkeys(("_comment", "zero_optimization.//", "zero_optimization.#a"), "a comment")
    assert config.optimizer.clip_grad == 0.5 and config.deepspeed["zero_optimization"] == {"stage": 0}


def test_whole_floats_are_integers_where_deepspeed_needs_integers(tmp_path: Path) -> None:
    content = {"train_micro_batch_size_per_gpu": 2.0, "steps_per_print": 1e5, "fp16": {"loss_scale_window": 1e3}}
    config = read(content, tmp_path)
    engine = engine_dict(config, 1)
    assert (config.batch.batch_size, engine["steps_per_print"]) == (2, 100000)
    assert type(config.batch.batch_size) is type(engine["steps_per_print"]) is int
    with pytest.raises(ConfigError, match="steps_per_print must be a positive integer, got 1.5"):
        read({"steps_per_print": 1.5}, tmp_path)


@pytest.mark.parametrize("text", ["Infinity", '"inf"'])
def test_an_infinite_interval_is_the_largest_integer(text: str, tmp_path: Path) -> None:
    config = read(f'{{"steps_per_print": {text}}}', tmp_path)
    assert engine_dict(config, 1)["steps_per_print"] == LARGEST_INT
    with pytest.raises(ConfigError, match="gradient_clipping must be a number of at least 0, got inf"):
        read('{"gradient_clipping": Infinity}', tmp_path)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("activation_checkpointing", "number_checkpoints", 4),
        ("activation_checkpointing", "synchronize_checkpoint_boundary", True),
        ("activation_checkpointing", "profile", True),
        ("fp16", "consecutive_hysteresis", True),
        ("", "seed", 7),
    ],
)
def test_a_key_that_only_tunes_is_ignored(section: str, key: str, value: Any, tmp_path: Path) -> None:
    config = read({section: {key: value}} if section else {key: value}, tmp_path)
    assert list(config.ignored) == [f"{section}.{key}".strip(".")]


def test_an_unknown_top_level_key_is_a_warning_unless_it_resembles_a_known_one(tmp_path: Path) -> None:
    config = read({"qqqq": {"a": 1}, "gradient_clipping": 0.5}, tmp_path)
    assert config.ignored == {"qqqq": "unknown key"} and config.deepspeed == {"gradient_clipping": 0.5}
    assert [note for note in config.notes if note.endswith("ds.json: unknown key qqqq has no effect")]
    with pytest.raises(ConfigError, match="unknown key gradient_cliping; did you mean gradient_clipping"):
        read({"gradient_cliping": 1}, tmp_path)
    with pytest.raises(ConfigError, match="unknown key qqqq in fp16"):
        read({"fp16": {"qqqq": 1}}, tmp_path)
    with pytest.raises(ConfigError, match="qqqq is rejected by --strict-flags"):
        read({"qqqq": 1}, tmp_path, "--strict-flags")


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": {"warmup_type": "linear", **params}}}


DECAY = scheduler("WarmupDecayLR", warmup_min_lr=0, warmup_max_lr=0.5, warmup_num_steps=10, total_num_steps=110)
COSINE = scheduler("WarmupCosineLR", warmup_num_steps=10, total_num_steps=110, cos_min_ratio=0.25)
COSINE |= {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}
CONSTANT = scheduler("WarmupLR", warmup_max_lr=0.5, warmup_num_steps=10.0)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (DECAY, "--lr 0.5 --lr-decay-style linear --lr-warmup-iters 10 --lr-decay-iters 110 --min-lr 0"),
        (COSINE, "--lr 0.5 --lr-decay-style cosine --lr-warmup-iters 10 --lr-decay-iters 110 --min-lr 0.125"),
        (CONSTANT, "--lr 0.5 --lr-decay-style constant --lr-warmup-iters 10"),
    ],
    ids=["decay", "cosine", "constant"],
)
def test_a_scheduler_with_a_linear_warm_up_has_the_rates_of_the_flags(
    content: dict[str, Any], line: str, tmp_path: Path
) -> None:
    ours = make_learning_rate(parse([*line.split(), "--train-iters", "120"], world_size=1, env={}))
    theirs = make_learning_rate(read(content, tmp_path, "--train-iters 120"))
    assert [theirs.after(step) for step in range(1, 121)] == [ours.after(step) for step in range(1, 121)]


@pytest.mark.parametrize("content", [DECAY, COSINE], ids=["decay", "cosine"])
def test_the_rates_are_those_of_deepspeed_two_steps_later(content: dict[str, Any], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from deepspeed.runtime import lr_schedules

    section = content["scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = getattr(lr_schedules, section["type"])(optimizer, **section["params"])
    ours = make_learning_rate(read(content, tmp_path, "--train-iters 120"))
    rates = []
    for _ in range(105):
        theirs.step()
        rates.append(optimizer.param_groups[0]["lr"])
    is_decay = section["type"] == "WarmupDecayLR"
    assert rates[:10] == pytest.approx([ours.after(step) if step else 0.0 for step in range(10)], rel=1e-6)
    shift = 0 if is_decay else 1  # of the decay: DeepSpeed's cosine is a step ahead of its own warm-up
    wanted = [ours.after(step + shift) for step in range(10, 105)]
    assert rates[10:] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (scheduler("OneCycle"), "key scheduler is not supported"),
        (scheduler("WarmupLR", warmup_type="log"), "key scheduler is not supported"),
        (scheduler("WarmupDecayLR"), "scheduler.params.total_num_steps is required by WarmupDecayLR"),
        (scheduler("WarmupLR", cos_min_ratio=0.1), "scheduler.params.cos_min_ratio is not a parameter of WarmupLR"),
        (scheduler("WarmupLR", warmup_min_lr=0.1), "scheduler.params.warmup_min_lr 0.1 is not supported"),
        (scheduler("WarmupLR", last_batch_iteration=3), "scheduler.params.last_batch_iteration 3 is not supported"),
        (scheduler("WarmupLR", warmup_num_steps=0.5), "scheduler.params.warmup_num_steps must be a positive integer"),
        (scheduler("WarmupLR", warmup_num_steps="9"), "scheduler.params.warmup_num_steps must be a number"),
    ],
)
def test_other_schedulers_and_values_are_rejected(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(content, tmp_path)


def test_flags_and_scheduler_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got --lr 0.1 and scheduler.params.warmup_max_lr 0.5"):
        read(DECAY, tmp_path, "--lr 0.1")
    with pytest.raises(ConfigError, match=r"scheduler.params.warmup_max_lr 0.001 \(default of WarmupDecayLR\)"):
        read(scheduler("WarmupDecayLR", total_num_steps=20), tmp_path, "--lr 0.1")


def test_muon_has_deepspeeds_defaults(tmp_path: Path) -> None:
    params = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "betas": [0.8, 0.9], "ns_method": "gram"}
    optimizer = read({"optimizer": {"type": "Muon", "params": params}}, tmp_path).optimizer
    assert (optimizer.optimizer, optimizer.lr, optimizer.muon_momentum, optimizer.weight_decay) == (
        "muon",
        0.02,
        0.9,
        0.1,
    )
    assert (optimizer.muon_scale_mode, optimizer.adam_beta1) == ("original", 0.8)
    defaults = read({"optimizer": {"type": "muon"}}, tmp_path).optimizer
    assert (defaults.lr, defaults.muon_momentum, defaults.weight_decay) == (1e-3, 0.95, 0.0)
    assert (
        read({"optimizer": {"type": "muon"}}, tmp_path, "--muon-scale-mode spectral").optimizer.muon_scale_mode
        == "spectral"
    )
    with pytest.raises(ConfigError, match="optimizer.params.amsgrad is not a parameter of Muon"):
        read({"optimizer": {"type": "Muon", "params": {"amsgrad": False}}}, tmp_path)
