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
from megatron.training.optimizer_setup import make_lr_scheduler


def parse_json(content: dict[str, Any] | str, folder: Path, line: str = "") -> Config:
    path = folder / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return parse(["--deepspeed_config", str(path), *line.split()], world_size=1, env={})


def test_comments_are_ignored_at_every_level(tmp_path: Path) -> None:
    content = {"_comment": "a run", "gradient_clipping": 0.5, "zero_optimization": {"//": [1], "stage": 0, "#a": {}}}
    config = parse_json(content, tmp_path)
    assert config.ignored == dict.fromkeys(("_comment", "zero_optimization.//", "zero_optimization.#a"), "a comment")
    assert config.optimizer.clip_grad == 0.5 and config.deepspeed["zero_optimization"] == {"stage": 0}


def test_integral_floats_are_accepted_as_integers(tmp_path: Path) -> None:
    content = {"train_micro_batch_size_per_gpu": 2.0, "steps_per_print": 1e5, "fp16": {"loss_scale_window": 1e3}}
    config = parse_json(content, tmp_path)
    engine = engine_dict(config, 1)
    assert (config.batch.batch_size, engine["steps_per_print"]) == (2, 100000)
    assert type(config.batch.batch_size) is type(engine["steps_per_print"]) is int
    with pytest.raises(ConfigError, match="steps_per_print must be a positive integer, got 1.5"):
        parse_json({"steps_per_print": 1.5}, tmp_path)


@pytest.mark.parametrize("text", ["Infinity", '"inf"'])
def test_infinite_interval_becomes_largest_integer(text: str, tmp_path: Path) -> None:
    config = parse_json(f'{{"steps_per_print": {text}}}', tmp_path)
    assert engine_dict(config, 1)["steps_per_print"] == LARGEST_INT
    with pytest.raises(ConfigError, match="gradient_clipping must be a number of at least 0, got inf"):
        parse_json('{"gradient_clipping": Infinity}', tmp_path)


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
def test_tuning_keys_are_ignored(section: str, key: str, value: Any, tmp_path: Path) -> None:
    config = parse_json({section: {key: value}} if section else {key: value}, tmp_path)
    assert list(config.ignored) == [f"{section}.{key}".strip(".")]


def test_unknown_top_level_key_warns_unless_misspelled(tmp_path: Path) -> None:
    config = parse_json({"qqqq": {"a": 1}, "gradient_clipping": 0.5}, tmp_path)
    assert config.ignored == {"qqqq": "unknown key"} and config.deepspeed == {"gradient_clipping": 0.5}
    assert [note for note in config.notes if note.endswith("ds.json: unknown key qqqq has no effect")]
    with pytest.raises(ConfigError, match="unknown key gradient_cliping; did you mean gradient_clipping"):
        parse_json({"gradient_cliping": 1}, tmp_path)
    with pytest.raises(ConfigError, match="unknown key qqqq in fp16"):
        parse_json({"fp16": {"qqqq": 1}}, tmp_path)
    with pytest.raises(ConfigError, match="qqqq is rejected by --strict-flags"):
        parse_json({"qqqq": 1}, tmp_path, "--strict-flags")


def make_scheduler(scheduler_type: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": scheduler_type, "params": {"warmup_type": "linear", **params}}}


DECAY = make_scheduler("WarmupDecayLR", warmup_min_lr=0, warmup_max_lr=0.5, warmup_num_steps=10, total_num_steps=110)
COSINE = make_scheduler("WarmupCosineLR", warmup_num_steps=10, total_num_steps=110, cos_min_ratio=0.25)
COSINE |= {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}
CONSTANT = make_scheduler("WarmupLR", warmup_max_lr=0.5, warmup_num_steps=10.0)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (DECAY, "--lr 0.5 --lr-decay-style linear --lr-warmup-iters 10 --lr-decay-iters 110 --min-lr 0"),
        (COSINE, "--lr 0.5 --lr-decay-style cosine --lr-warmup-iters 10 --lr-decay-iters 110 --min-lr 0.125"),
        (CONSTANT, "--lr 0.5 --lr-decay-style constant --lr-warmup-iters 10"),
    ],
    ids=["decay", "cosine", "constant"],
)
def test_json_scheduler_matches_flag_learning_rates(content: dict[str, Any], line: str, tmp_path: Path) -> None:
    expected = make_lr_scheduler(parse([*line.split(), "--train-iters", "120"], world_size=1, env={}))
    actual = make_lr_scheduler(parse_json(content, tmp_path, "--train-iters 120"))
    assert [actual.after(step) for step in range(1, 121)] == [expected.after(step) for step in range(1, 121)]


@pytest.mark.parametrize("content", [DECAY, COSINE], ids=["decay", "cosine"])
def test_learning_rates_match_deepspeed_scheduler(content: dict[str, Any], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from deepspeed.runtime import lr_schedules

    section = content["scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    deepspeed_scheduler = getattr(lr_schedules, section["type"])(optimizer, **section["params"])
    schedule = make_lr_scheduler(parse_json(content, tmp_path, "--train-iters 120"))
    rates = []
    for _ in range(105):
        deepspeed_scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    is_decay = section["type"] == "WarmupDecayLR"
    assert rates[:10] == pytest.approx([schedule.after(step) if step else 0.0 for step in range(10)], rel=1e-6)
    shift = 0 if is_decay else 1  # of the decay: DeepSpeed's cosine is a step ahead of its own warm-up
    expected = [schedule.after(step + shift) for step in range(10, 105)]
    assert rates[10:] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (make_scheduler("OneCycle"), "key scheduler is not supported"),
        (make_scheduler("WarmupLR", warmup_type="log"), "key scheduler is not supported"),
        (make_scheduler("WarmupDecayLR"), "scheduler.params.total_num_steps is required by WarmupDecayLR"),
        (
            make_scheduler("WarmupLR", cos_min_ratio=0.1),
            "scheduler.params.cos_min_ratio is not a parameter of WarmupLR",
        ),
        (make_scheduler("WarmupLR", warmup_min_lr=0.1), "scheduler.params.warmup_min_lr 0.1 is not supported"),
        (
            make_scheduler("WarmupLR", last_batch_iteration=3),
            "scheduler.params.last_batch_iteration 3 is not supported",
        ),
        (
            make_scheduler("WarmupLR", warmup_num_steps=0.5),
            "scheduler.params.warmup_num_steps must be a positive integer",
        ),
        (make_scheduler("WarmupLR", warmup_num_steps="9"), "scheduler.params.warmup_num_steps must be a number"),
    ],
)
def test_unsupported_schedulers_and_values_raise(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_json(content, tmp_path)


def test_conflicting_flag_and_scheduler_raise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got --lr 0.1 and scheduler.params.warmup_max_lr 0.5"):
        parse_json(DECAY, tmp_path, "--lr 0.1")
    with pytest.raises(ConfigError, match=r"scheduler.params.warmup_max_lr 0.001 \(default of WarmupDecayLR\)"):
        parse_json(make_scheduler("WarmupDecayLR", total_num_steps=20), tmp_path, "--lr 0.1")


def test_muon_uses_deepspeed_defaults(tmp_path: Path) -> None:
    params = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "betas": [0.8, 0.9], "ns_method": "gram"}
    optimizer = parse_json({"optimizer": {"type": "Muon", "params": params}}, tmp_path).optimizer
    assert (optimizer.optimizer, optimizer.lr, optimizer.muon_momentum, optimizer.weight_decay) == (
        "muon",
        0.02,
        0.9,
        0.1,
    )
    assert (optimizer.muon_scale_mode, optimizer.adam_beta1) == ("original", 0.8)
    defaults = parse_json({"optimizer": {"type": "muon"}}, tmp_path).optimizer
    assert (defaults.lr, defaults.muon_momentum, defaults.weight_decay) == (1e-3, 0.95, 0.0)
    assert (
        parse_json({"optimizer": {"type": "muon"}}, tmp_path, "--muon-scale-mode spectral").optimizer.muon_scale_mode
        == "spectral"
    )
    with pytest.raises(ConfigError, match="optimizer.params.amsgrad is not a parameter of Muon"):
        parse_json({"optimizer": {"type": "Muon", "params": {"amsgrad": False}}}, tmp_path)
