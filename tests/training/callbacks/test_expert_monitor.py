"""What records say of experts: against counts by hand, in every layout the same; routers that collapse are told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import parse
from megatron.config.stability import StabilityConfig
from megatron.models.common.router import ExpertLoad, Router
from megatron.training.callbacks import expert_monitor
from megatron.training.callbacks.console import progress_line
from megatron.training.callbacks.expert_monitor import ExpertMonitor, load_metrics
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.trainer import Trainer
from tests.helpers import runs

E, K = 8, 2
EXPERT_ARGS = f"--disable-bias-linear --num-experts {E} --moe-ffn-hidden-size 16 --moe-router-topk {K}"


def make_load(*rows: list[int], dropped: list[int] | None = None) -> ExpertLoad:
    """Return the load of layers with these choices of experts."""
    names = tuple(f"layers.{layer_idx}" for layer_idx in range(len(rows)))
    return ExpertLoad(names, torch.tensor(rows), torch.tensor(dropped or [0] * len(rows)))


def make_monitor(extra: str = "", window: int = 4) -> ExpertMonitor:
    model = parse(f"--data-path none {EXPERT_ARGS} {extra}".split(), world_size=1).model
    return ExpertMonitor(model, StabilityConfig(stability_window=window))


def test_values_match_documented_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[5, 1, 0, 9, 3, 2, 4, 8], [4] * E, [16, 16, *[0] * 6]]
    values = load_metrics(make_load(*rows, dropped=[3, 0, 8]), has_capacity=True)
    for layer, row in enumerate(rows):
        name, total = f"layers.{layer}", sum(row)
        shares = [count / total for count in row if count]
        assert values["moe_load_imbalance"][name] == max(row) / (total / E)
        assert values["moe_entropy"][name] == pytest.approx(-sum(p * math.log(p, E) for p in shares), rel=1e-14)
        assert values["moe_dropped"][name] == [3, 0, 8][layer] / total
        assert values["moe_tokens_per_expert"][name] == row
    assert values["moe_entropy"]["layers.1"] == 1.0
    assert values["moe_entropy"]["layers.2"] == pytest.approx(math.log(K) / math.log(E))
    assert values["moe_load_imbalance"]["layers.2"] == E / K
    monkeypatch.setattr(expert_monitor, "MAX_TABLE_SIZE", 3 * E - 1)
    assert set(load_metrics(make_load(*rows), has_capacity=False)) == {"moe_load_imbalance", "moe_entropy"}


EVEN, UNEVEN = [4] * E, [16, 15, 1, *[0] * 5]


def test_router_collapse_is_reported_again_only_after_balanced_load() -> None:
    """Of two layers one collapses: the mean of the last four steps decides."""
    current = make_monitor()
    reported = []
    for step, row in enumerate([EVEN] * 4 + [UNEVEN] * 20 + [EVEN] * 9 + [UNEVEN] * 9, start=1):
        reported += [(step, *current.update_collapsed(make_load(EVEN, row)))]
        if step == 7:  # a run that goes on judges alike
            current, previous = make_monitor(), current
            current.load_state_dict(previous.state_dict())
    assert [report for report in reported if report[1:]] == [(7, "layers.1"), (36, "layers.1")]


def test_initially_collapsed_router_is_reported_after_half_window() -> None:
    collapsed_monitor = make_monitor(window=6)
    assert [len(collapsed_monitor.update_collapsed(make_load(UNEVEN))) for _ in range(6)] == [0, 0, 1, 0, 0, 0]
    recovering_monitor = make_monitor(window=6)
    assert not any(recovering_monitor.update_collapsed(make_load(row)) for row in [UNEVEN] * 2 + [EVEN] * 6), (
        "its mean alone is low"
    )
    all_experts_monitor = make_monitor(f"--moe-router-topk {E}")
    assert not any(all_experts_monitor.update_collapsed(make_load([3] * E)) for _ in range(4)), (
        "all experts are chosen at any time"
    )


@pytest.mark.parametrize(
    ("extra", "advice"),
    [
        ("--moe-aux-loss-coeff 0.02", "Raise --moe-aux-loss-coeff (0.02)"),
        ("", "Add --moe-aux-loss-coeff 0.01"),
        (
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            "Raise --moe-router-bias-update-rate (0.001)",
        ),
    ],
)
def test_collapse_warning_names_layers_values_and_advice(extra: str, advice: str) -> None:
    collapse_monitor, current_load = make_monitor(extra), make_load(EVEN, *[UNEVEN] * 5)
    collapse_monitor.update_collapsed(current_load)
    text = collapse_monitor._warning(collapse_monitor.update_collapsed(current_load), current_load)
    assert text == (
        "router collapse: layers.1, layers.2, layers.3 and 2 more: the mean entropy of layers.1 over 2 steps "
        f"corresponds to 2.2 of 8 experts; the most loaded expert now has 4.00 x the mean tokens. {advice}, or "
        "lower --lr; docs/monitoring.md#experts"
    )


def test_progress_line_shows_worst_layer() -> None:
    values = {"loss": 1.0, "learning_rate": 1e-3, "grad_norm": 1.0, "loss_scale": 1.0, "tokens_per_s": 1.0, "step_s": 1}
    rates = {"mfu": None, "skipped": 0, "flops_per_s": 1.0, "data_wait": 0.0}
    line = progress_line(1, 2, {**values, **rates, **load_metrics(make_load(EVEN, UNEVEN, EVEN), has_capacity=False)})
    assert "| load imbalance 4.00 |" in line
    assert "imbalance" not in progress_line(1, 2, {**values, **rates})


# Whole runs, whose routers a test forces to two experts behind the first step.

RUN_ARGS = (
    f"{EXPERT_ARGS} --fp64 --num-layers 4 --moe-layer-freq [0,1,1,1] --moe-router-score-function sigmoid --lr 1e-3 "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0 --moe-expert-capacity-factor 1 --train-iters 2 "
    "--eval-iters 0 --stability-window 4 --hidden-dropout 0 --attention-dropout 0 --gas 2 --batch-size 2"
)
METRIC_NAMES = ("moe_load_imbalance", "moe_entropy", "moe_dropped", "moe_tokens_per_expert")
LAYERS = ["layers.1", "layers.2", "layers.3"]
SLOW = pytest.mark.slow
LAYOUTS: dict[str, tuple[int, str]] = {
    "pipe 2 x data 2": (4, "--pipe-parallel-size 2 --gas 1"),
    "tensor 2, sequence": (2, "--model-parallel-size 2 --sequence-parallel"),
    "context 2": (2, "--context-parallel-size 2"),
    "experts 2": (2, "--expert-model-parallel-size 2 --gas 1"),
    "pipe 2, chunks 2": (2, "--pipe-parallel-size 2 --pipeline-chunks 2"),
    "recompute, other micro-batches": (1, "--checkpoint-activations --batch-size 4 --gas 1"),
}


def force_two_experts(rank: int, trainer: Trainer) -> None:
    """Send all tokens of the second step to two experts."""
    if trainer.progress.step == 1:
        for router in trainer.engine.module.modules():
            if isinstance(router, Router):
                assert router.expert_bias is not None
                router.expert_bias.data[[2, 5]] = 9.0


def train_and_read_records(corpus: Path, folder: Path, num_ranks: int = 1, extra: str = "") -> list[dict[str, Any]]:
    """Train, and return what each step's record says of experts."""
    argv = runs.make_flags(corpus, folder, f"{RUN_ARGS} {extra}")
    assert runs.train_ranks(num_ranks, argv, runs.inject_after_update(force_two_experts))[0] == [0] * num_ranks
    train_records = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]
    return [{name: record[name] for name in METRIC_NAMES} for record in train_records]


@pytest.fixture(scope="module")
def reference_records(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train_and_read_records(corpus, tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize(
    "layout", [name if name.startswith("pipe 2 x") else pytest.param(name, marks=SLOW) for name in LAYOUTS]
)
def test_all_layouts_record_same_values_and_warnings(
    layout: str,
    reference_records: list[dict[str, Any]],
    corpus: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert train_and_read_records(corpus, tmp_path / "run", *LAYOUTS[layout]) == reference_records
    num_choices, capacity = 4 * 32 * K, math.ceil(32 * K / E)
    for name in LAYERS:
        first, last = (record["moe_tokens_per_expert"][name] for record in reference_records)
        assert sum(first) == num_choices and min(first) > 0
        assert last == [0, 0, num_choices // 2, 0, 0, num_choices // 2, 0, 0]
        assert reference_records[1]["moe_load_imbalance"][name] == E / K
        assert reference_records[1]["moe_dropped"][name] == 1 - 4 * 2 * capacity / num_choices
    assert [list(reference_records[0][name]) for name in METRIC_NAMES] == [LAYERS] * 4
    assert all(reference_records[0]["moe_entropy"][name] < 1 - 1e-3 for name in LAYERS), (
        "so that the mean of both is low enough"
    )
    lines = [line for line in capfd.readouterr().out.splitlines() if "router collapse" in line]
    assert len(lines) == 1 and lines[0].startswith("step 2 | router collapse: layers.")
