"""Learning rates, decays and epsilons of parameters by name: what they are, and one run in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import parse
from megatron.errors import ConfigError
from megatron.models.common.decoder import DecoderModel
from megatron.optim import build_optimizer
from megatron.optim.lr_scheduler import set_learning_rates
from megatron.optim.param_rates import HEAD, WORD_TABLE, RateTable
from megatron.training.optimizer_setup import make_learning_rate
from megatron.training.trainer import Callback, Trainer
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import check_fp64, difference
from tests.helpers.model_samples import filled, small_sizes
from tests.optim.test_adafactor_layouts import load_and_go_on, save_and_go_on, started

LINE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 101 --data-path none "
    "--device cpu --train-iters 40 --lr 1e-2 --min-lr 1e-3"
)
UNTIED = "--untie-embeddings-and-output-weights"
OWN = (
    f"{UNTIED} --lr-embedding 3e-3 --lr-head 5e-4 --lr-by-name layers.1.*=2e-4,layers.*.mlp.up.weight=4e-3 "
    "--weight-decay 0.1 --weight-decay-by-name final_norm.*=0.3"
)


def config_of(extra: str) -> Any:
    return parse(f"{LINE} {extra}".split(), world_size=1).with_vocab(101)


def rates_of(extra: str, update: int = 20) -> dict[str, tuple[float, float]]:
    """Return the rate and the decay of each parameter in one update."""
    config = config_of(extra)
    model = filled(DecoderModel(small_sizes(untie_embeddings=UNTIED in extra)))
    table, names = RateTable.of(config), {p: name for name, p in model.named_parameters()}
    table.check_names(names.values())
    own = {p: rate for p, name in names.items() if (rate := table.rate_of(name, p)) is not None}
    settings = config.optimizer
    how: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay, "name": settings.optimizer}
    optimizer = build_optimizer(names, rates=own, **how)
    set_learning_rates(optimizer, make_learning_rate(config), update + 1)
    groups = [(names[p], g) for g in optimizer.param_groups for p in g["params"]]
    assert len(groups) == len(names)
    return {name: (group["lr"], group["weight_decay"]) for name, group in groups}


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_each_parameter_has_the_rate_of_the_last_pattern_that_fits_it(optimizer: str) -> None:
    found = rates_of(f"--optimizer {optimizer} {OWN}")
    common = make_learning_rate(config_of(f"--optimizer {optimizer} {OWN}")).at(20)
    share = common / 1e-2
    wanted = {WORD_TABLE: 3e-3, HEAD: 5e-4, "layers.1.mlp.up.weight": 4e-3, "layers.0.mlp.up.weight": 4e-3}
    for name, (rate, decay) in found.items():
        peak = wanted.get(name, 2e-4 if name.startswith("layers.1.") else 1e-2)
        assert rate == pytest.approx(peak * share, rel=1e-12), name
        is_matrix = not name.endswith("bias") and "norm" not in name
        assert decay == (0.3 if name.startswith("final_norm") else 0.1 * is_matrix), name


@pytest.mark.parametrize("style", ["linear", "cosine", "wsd", "inverse-square-root", "exponential", "constant"])
@pytest.mark.parametrize("update", [0, 30, 39])
def test_all_rates_have_one_course_with_the_floor_in_the_ratio_of_the_peaks(style: str, update: int) -> None:
    found = rates_of(f"--lr-decay-style {style} --warmup 0.1 --lr-embedding 4e-3", update)
    common = make_learning_rate(config_of(f"--lr-decay-style {style} --warmup 0.1")).at(update)
    assert found["layers.0.mlp.up.weight"][0] == common
    assert found[WORD_TABLE][0] == pytest.approx(0.4 * common, rel=1e-12)


def test_decoupled_rates_are_megatrons() -> None:
    """Word table and head alone, and the floor is --min-lr itself unless it is given."""
    end = rates_of(f"{UNTIED} --decoupled-lr 4e-3", 39)
    assert end[WORD_TABLE][0] == end[HEAD][0] == pytest.approx(1e-3)
    assert end["embedding.position.weight"] == end["layers.0.mlp.up.weight"]
    given = rates_of(f"{UNTIED} --decoupled-lr 4e-3 --decoupled-min-lr 2e-3", 39)
    assert given[WORD_TABLE][0] == given[HEAD][0] == pytest.approx(2e-3)
    assert rates_of("--decoupled-lr 4e-3", 39)[WORD_TABLE] == end[WORD_TABLE], "a tied head is the table"


def test_nothing_is_changed_where_nothing_is_said() -> None:
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
def test_what_cannot_be_is_refused(extra: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(extra)
    assert text in str(refused.value)


def test_a_tied_head_may_name_the_rate_of_its_table() -> None:
    assert rates_of("--lr-head 4e-3 --lr-embedding 4e-3")[WORD_TABLE] == rates_of("--lr-embedding 4e-3")[WORD_TABLE]


def test_a_pattern_that_fits_nothing_is_refused_with_near_names() -> None:
    with pytest.raises(ConfigError, match=r"'layers.0.mlp.gate.weight'.*Similar names: layers.0.mlp.up.weight"):
        rates_of("--lr-by-name layers.0.mlp.gate.weight=1e-3")


FP64 = "--fp64 --clip-grad 0.5"
LAYOUTS = [
    (2, 1, 1, 0, "adamw"), (1, 2, 1, 0, "muon"), (1, 1, 2, 1, "adamw"), (2, 1, 2, 1, "muon"), (1, 2, 2, 1, "muon"),
    (1, 1, 2, 2, "muon"),
    (1, 1, 2, 3, "adamw"), (2, 2, 1, 0, "adamw"),
]  # fmt: skip


ALL = (
    "--mup-base-hidden-size 8 --mup-base-head-dim 2 --embedding-multiplier 3 --residual-scale 1.4 --z-loss 0.02 "
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
)
"""Scalings, z-loss and states in bf16, whose own files have more layouts in the long run."""


def test_all_of_it_together_trains_the_weights_of_one_process() -> None:
    found = difference(2, 1, 1, 4, f"{FP64} {OWN} {ALL}", "--sequence-parallel", steps=3)
    check_fp64(found)
    assert found.weight <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data", "stage", "optimizer"), [*LAYOUTS, (1, 1, 2, 1, "muon")])
def test_every_layout_trains_the_weights_of_one_process(
    tensor: int, pipe: int, data: int, stage: int, optimizer: str
) -> None:
    extra = f"{FP64} {OWN} --optimizer {optimizer}"
    found = difference(tensor, pipe, data, 4, extra, f"--zero-stage {stage}", steps=6)
    check_fp64(found)
    assert found.weight <= 1e-10


def moved(rank: int, data: int, folder: Path) -> list[Any]:
    """Return what a run of five steps, one resumed at the third, and one resumed with other rates end with.

    The states of the first two are in bf16, and those of the last in fp32.
    """
    plain = "--fp32 --hidden-dropout 0.1 --adam-beta2 0.95"
    rated = f"{plain} {OWN} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    whole = save_and_go_on(rank, "gpt2", 1, data, f"{rated} --zero-stage 1", folder)
    again = load_and_go_on(rank, "gpt2", 1, data, f"{rated} --zero-stage 1", folder)
    other = load_and_go_on(rank, "gpt2", 1, data, f"{plain} {UNTIED} --zero-stage 1", folder)
    return [whole, again, other]


@pytest.mark.slow
@pytest.mark.parametrize("data", [1, 2])
def test_a_resumed_run_is_bit_for_bit_the_same_and_other_rates_hold_from_the_next_step_on(
    data: int, tmp_path: Path
) -> None:
    for (losses, weights), (losses_again, weights_again), (others, other) in run_ranks(data, moved, data, tmp_path):
        assert losses_again == losses
        assert all(torch.equal(weights_again[name], weight) for name, weight in weights.items())
        assert others[:2] == losses[:1] + others[1:2] and not torch.equal(other[HEAD], weights[HEAD])


class Logged(Callback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []

    def on_log(self, metrics: dict[str, Any]) -> None:
        self.metrics.append(metrics)


def logged(rank: int) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Return the metrics of two steps on two stages, and what groups had in each."""
    config, here, engine, data = started(rank, "gpt2", 2, 1, f"--fp32 --log-interval 1 {OWN}")
    watch, groups = Logged(), []
    trainer = Trainer(config, here, engine, data, Path(), [watch])
    with trainer.open_batches():
        for _ in range(2):
            trainer.train_step()
            groups.append({str(g.get("peak_lr", "")): g["lr"] for g in engine.optimizer.param_groups})
    return watch.metrics, groups


def test_every_rank_logs_all_rates_as_groups_have_them() -> None:
    for metrics, groups in run_ranks(2, logged):
        for said, held in zip(metrics, groups, strict=True):
            labels = {"embedding": "0.003", "head": "0.0005", "layers.1.*": "0.0002", "layers.*.mlp.up.weight": "0.004"}
            assert set(said["lr"]) == set(labels)
            assert held[""] == said["learning_rate"]
            assert all(held.get(peak, said["lr"][label]) == said["lr"][label] for label, peak in labels.items())
            assert said["lr"]["embedding"] == pytest.approx(3 * said["learning_rate"], rel=1e-12)
