"""Learning rates, decays and epsilons of parameters by name: what they are, and one run in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import parse
from megatron.errors import ConfigError
from megatron.models.common.decoder import DecoderModel
from megatron.mpu.groups import single_grid
from megatron.optim import build_optimizer
from megatron.optim.lr_scheduler import set_learning_rates
from megatron.optim.param_rates import HEAD, WORD_TABLE, RateTable
from megatron.optim.weight_decay import set_weight_decay
from megatron.training.optimizer_setup import make_lr_scheduler, make_optimizer
from megatron.training.trainer import Callback, Trainer
from megatron.training.world import World
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import check_fp64, compare_layout
from tests.helpers.model_samples import fill_weights, small_model_args
from tests.optim.test_adafactor_layouts import build_training, load_and_continue, save_and_continue

LINE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 101 --data-path none "
    "--device cpu --train-iters 40 --lr 1e-2 --min-lr 1e-3"
)
UNTIED = "--untie-embeddings-and-output-weights"
RATE_FLAGS = (
    f"{UNTIED} --lr-embedding 3e-3 --lr-head 5e-4 --lr-by-name layers.1.*=2e-4,layers.*.mlp.up.weight=4e-3 "
    "--weight-decay 0.1 --weight-decay-by-name final_norm.*=0.3"
)


def config_of(extra: str) -> Any:
    return parse(f"{LINE} {extra}".split(), world_size=1).with_vocab(101)


def rates_of(extra: str, update: int = 20) -> dict[str, tuple[float, float]]:
    """Return the rate and the decay of each parameter in one update."""
    config = config_of(extra)
    model = fill_weights(DecoderModel(small_model_args(untie_embeddings=UNTIED in extra)))
    table, names = RateTable.of(config), {p: name for name, p in model.named_parameters()}
    table.check_names(names.values())
    rates = {p: rate for p, name in names.items() if (rate := table.rate_of(name, p)) is not None}
    settings = config.optimizer
    options: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay, "name": settings.optimizer}
    optimizer = build_optimizer(names, rates=rates, **options)
    set_learning_rates(optimizer, make_lr_scheduler(config), update + 1)
    groups = [(names[p], g) for g in optimizer.param_groups for p in g["params"]]
    assert len(groups) == len(names)
    return {name: (group["lr"], group["weight_decay"]) for name, group in groups}


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_parameter_uses_rate_of_last_matching_pattern(optimizer: str) -> None:
    rates = rates_of(f"--optimizer {optimizer} {RATE_FLAGS}")
    base_rate = make_lr_scheduler(config_of(f"--optimizer {optimizer} {RATE_FLAGS}")).at(20)
    decay_factor = base_rate / 1e-2
    expected = {WORD_TABLE: 3e-3, HEAD: 5e-4, "layers.1.mlp.up.weight": 4e-3, "layers.0.mlp.up.weight": 4e-3}
    for name, (rate, decay) in rates.items():
        peak = expected.get(name, 2e-4 if name.startswith("layers.1.") else 1e-2)
        assert rate == pytest.approx(peak * decay_factor, rel=1e-12), name
        is_matrix = not name.endswith("bias") and "norm" not in name
        assert decay == (0.3 if name.startswith("final_norm") else 0.1 * is_matrix), name


@pytest.mark.parametrize("flag", ["--apply-wd-to-qk-layernorm", "--no-weight-decay-cond-type qwen3_next"])
@pytest.mark.parametrize("norm_type", ["head", "per-head", "all"])
def test_weight_decay_of_query_and_key_norms(norm_type: str, flag: str) -> None:
    config = config_of(f"--fp32 --qk-norm {norm_type} --weight-decay 0.1 {flag}")
    model = DecoderModel(small_model_args(qk_norm=norm_type))
    optimizer = make_optimizer(config, model, World("cpu", torch.device("cpu"), single_grid(), 0))
    set_weight_decay(optimizer, 0.3)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decays = {names[p]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decays) == len(names)
    for name, decay in decays.items():
        is_decayed = not name.endswith("bias") and "norm" not in name or "query_norm" in name or "key_norm" in name
        assert decay == 0.3 * is_decayed, name


@pytest.mark.parametrize("style", ["linear", "cosine", "wsd", "inverse-square-root", "exponential", "constant"])
@pytest.mark.parametrize("update", [0, 30, 39])
def test_all_rates_share_one_schedule_and_floor_ratio(style: str, update: int) -> None:
    rates = rates_of(f"--lr-decay-style {style} --warmup 0.1 --lr-embedding 4e-3", update)
    base_rate = make_lr_scheduler(config_of(f"--lr-decay-style {style} --warmup 0.1")).at(update)
    assert rates["layers.0.mlp.up.weight"][0] == base_rate
    assert rates[WORD_TABLE][0] == pytest.approx(0.4 * base_rate, rel=1e-12)


def test_decoupled_rates_match_megatron() -> None:
    """Word table and head alone, and the floor is --min-lr itself unless it is given."""
    final_rates = rates_of(f"{UNTIED} --decoupled-lr 4e-3", 39)
    assert final_rates[WORD_TABLE][0] == final_rates[HEAD][0] == pytest.approx(1e-3)
    assert final_rates["embedding.position.weight"] == final_rates["layers.0.mlp.up.weight"]
    floored_rates = rates_of(f"{UNTIED} --decoupled-lr 4e-3 --decoupled-min-lr 2e-3", 39)
    assert floored_rates[WORD_TABLE][0] == floored_rates[HEAD][0] == pytest.approx(2e-3)
    assert rates_of("--decoupled-lr 4e-3", 39)[WORD_TABLE] == final_rates[WORD_TABLE], "a tied head is the table"


def test_rate_table_is_empty_by_default() -> None:
    table = RateTable.of(config_of(""))
    assert not table.rates and not table.decays
    assert table.rate_of(WORD_TABLE, torch.zeros(2, 2)) is None


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ("--lr-head 1e-3", "--lr-head needs an untied output head"),
        (f"{UNTIED} --decoupled-lr 1e-2 --lr-head 1e-3", "got --lr-head too"),
        ("--decoupled-min-lr 1e-3", "has no effect without --decoupled-lr"),
        ("--decoupled-lr 5e-4", "Add --decoupled-min-lr"),
        ("--decoupled-lr 5e-3 --decoupled-min-lr 6e-3", "got 0.006 and 0.005"),
        ("--lr-by-name layers.*", "must be PATTERN=NUMBER"),
        ("--lr-by-name layers.*=1e-3,layers.*=2e-3", "with distinct patterns"),
        ("--weight-decay-by-name layers.*=-1", "--weight-decay-by-name must be PATTERN=NUMBER"),
        ("--lr-embedding 1e-3 --save-interval 5 --save x --checkpoint-format deepspeed", "got --lr-embedding"),
    ],
)
def test_unsupported_combinations_are_rejected(extra: str, text: str) -> None:
    with pytest.raises(ConfigError) as excinfo:
        config_of(extra)
    assert text in str(excinfo.value)


def test_tied_head_accepts_rate_of_its_table() -> None:
    assert rates_of("--lr-head 4e-3 --lr-embedding 4e-3")[WORD_TABLE] == rates_of("--lr-embedding 4e-3")[WORD_TABLE]


def test_unmatched_pattern_is_rejected_with_similar_names() -> None:
    with pytest.raises(ConfigError, match=r"'layers.0.mlp.gate.weight'.*Similar names: layers.0.mlp.up.weight"):
        rates_of("--lr-by-name layers.0.mlp.gate.weight=1e-3")


FP64 = "--fp64 --clip-grad 0.5"
LAYOUTS = [
    (2, 1, 1, 0, "adamw"), (1, 2, 1, 0, "muon"), (1, 1, 2, 1, "adamw"), (2, 1, 2, 1, "muon"), (1, 2, 2, 1, "muon"),
    (1, 1, 2, 2, "muon"),
    (1, 1, 2, 3, "adamw"), (2, 2, 1, 0, "adamw"),
]  # fmt: skip


ALL_FEATURES = (
    "--mup-base-hidden-size 8 --mup-base-head-dim 2 --embedding-multiplier 3 --residual-scale 1.4 --z-loss 0.02 "
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
)
"""Scalings, z-loss and states in bf16, whose own files have more layouts in the long run."""


def test_all_features_match_single_process_weights() -> None:
    result = compare_layout(2, 1, 1, 4, f"{FP64} {RATE_FLAGS} {ALL_FEATURES}", "--sequence-parallel", steps=3)
    check_fp64(result)
    assert result.weight <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data", "stage", "optimizer"), [*LAYOUTS, (1, 1, 2, 1, "muon")])
def test_every_layout_matches_single_process_weights(
    tensor: int, pipe: int, data: int, stage: int, optimizer: str
) -> None:
    extra = f"{FP64} {RATE_FLAGS} --optimizer {optimizer}"
    result = compare_layout(tensor, pipe, data, 4, extra, f"--zero-stage {stage}", steps=6)
    check_fp64(result)
    assert result.weight <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data", "stage"), [(2, 1, 1, 0), (1, 2, 2, 1), (1, 1, 2, 3)])
def test_decayed_norms_match_single_process_weights(tensor: int, pipe: int, data: int, stage: int) -> None:
    """With RMSNorm, because the bias of a key norm has a gradient of rounding errors only."""
    extra = f"{FP64} --normalization RMSNorm --qk-norm head --weight-decay 0.5 --apply-wd-to-qk-layernorm"
    result = compare_layout(tensor, pipe, data, 4, extra, f"--zero-stage {stage}", steps=3)
    check_fp64(result)
    assert result.weight <= 1e-10


def resume_with_rates(rank: int, data: int, folder: Path) -> list[Any]:
    """Return what a run of five steps, one resumed at the third, and one resumed with other rates end with.

    The states of the first two are in bf16, and those of the last in fp32.
    """
    plain = "--fp32 --hidden-dropout 0.1 --adam-beta2 0.95"
    rated = f"{plain} {RATE_FLAGS} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    uninterrupted = save_and_continue(rank, "gpt2", 1, data, f"{rated} --zero-stage 1", folder)
    resumed = load_and_continue(rank, "gpt2", 1, data, f"{rated} --zero-stage 1", folder)
    resumed_unrated = load_and_continue(rank, "gpt2", 1, data, f"{plain} {UNTIED} --zero-stage 1", folder)
    return [uninterrupted, resumed, resumed_unrated]


@pytest.mark.slow
@pytest.mark.parametrize("data", [1, 2])
def test_resume_is_bitwise_and_new_rates_apply_from_next_step(data: int, tmp_path: Path) -> None:
    for (losses, weights), (losses_again, weights_again), (other_losses, other_weights) in run_ranks(
        data, resume_with_rates, data, tmp_path
    ):
        assert losses_again == losses
        assert all(torch.equal(weights_again[name], weight) for name, weight in weights.items())
        assert other_losses[:2] == losses[:1] + other_losses[1:2] and not torch.equal(
            other_weights[HEAD], weights[HEAD]
        )


class MetricsRecorder(Callback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []

    def on_log(self, metrics: dict[str, Any]) -> None:
        self.metrics.append(metrics)


def log_two_steps(rank: int) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Return the metrics of two steps on two stages, and what groups had in each."""
    config, world, engine, data = build_training(rank, "gpt2", 2, 1, f"--fp32 --log-interval 1 {RATE_FLAGS}")
    recorder, groups = MetricsRecorder(), []
    trainer = Trainer(config, world, engine, data, Path(), [recorder])
    with trainer.open_batches():
        for _ in range(2):
            trainer.train_step()
            groups.append({str(g.get("peak_lr", "")): g["lr"] for g in engine.optimizer.param_groups})
    return recorder.metrics, groups


def test_every_rank_logs_group_rates() -> None:
    for metrics, groups in run_ranks(2, log_two_steps):
        for step_metrics, group_rates in zip(metrics, groups, strict=True):
            labels = {"embedding": "0.003", "head": "0.0005", "layers.1.*": "0.0002", "layers.*.mlp.up.weight": "0.004"}
            assert set(step_metrics["lr"]) == set(labels)
            assert group_rates[""] == step_metrics["learning_rate"]
            assert all(
                group_rates.get(peak, step_metrics["lr"][label]) == step_metrics["lr"][label]
                for label, peak in labels.items()
            )
            assert step_metrics["lr"]["embedding"] == pytest.approx(3 * step_metrics["learning_rate"], rel=1e-12)
