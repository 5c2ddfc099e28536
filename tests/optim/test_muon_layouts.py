"""Muon in every layout: the weights of one process, one owner for each matrix, and states that load into any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import open_latest
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.errors import CheckpointError
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard
from megatron.optim import muon
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import check_fp64, compare_layout, make_flags, trace_rank
from tests.optim.test_adafactor_layouts import load_and_continue, save_and_continue

MUON = "--optimizer muon --weight-decay 0.01"
FP64 = f"--fp64 {MUON} --clip-grad 0.5"
ADAPTIVE = "--optimizer adaptive_muon --muon-fp32-matmul-prec highest --adaptive-muon-moment2-method"
ADAMUON, NORMUON = f"{ADAPTIVE} adamuon", f"{ADAPTIVE} normuon"
EXPERTS, EP = "--num-experts 4 --moe-ffn-hidden-size 24 --disable-bias-linear", "--expert-model-parallel-size"
GROUPED = "--num-query-groups 2 --activation gated-silu"
QUICK_LAYOUTS = {(2, 1, 2, 1, 1)}
LAYOUTS = [
    (2, 1, 1, 0, 1), (4, 1, 1, 0, 1), (1, 2, 1, 0, 1), (1, 1, 2, 0, 1), (1, 1, 2, 1, 1), (1, 1, 2, 2, 1),
    (1, 1, 2, 3, 1), (1, 1, 4, 1, 1), (1, 1, 1, 0, 2), (1, 1, 1, 1, 2), (2, 2, 1, 0, 1), (1, 2, 2, 1, 1),
    (2, 1, 2, 1, 1), (2, 1, 2, 3, 1),
]  # fmt: skip
"""tensor, pipe, data, ZeRO stage, context; quick ones have three steps, the others twenty."""


def slow_but(quick: set[tuple[int, ...]]) -> list[Any]:
    return [pytest.param(*layout, marks=() if layout in quick else pytest.mark.slow) for layout in LAYOUTS]


@pytest.mark.parametrize(("tensor", "pipe", "data", "stage", "context"), slow_but(QUICK_LAYOUTS))
def test_every_layout_matches_single_process_weights(
    tensor: int, pipe: int, data: int, stage: int, context: int
) -> None:
    """The scale depends on the shape of a matrix, so queries and keys have different scales.

    On four tensor ranks, two ranks would share each of the two query groups, so that layout has no query groups.
    """
    extra = f"{FP64} {GROUPED if tensor < 4 else '--activation gated-silu'} --muon-scale-mode unit_rms_norm"
    steps = 3 if (tensor, pipe, data, stage, context) in QUICK_LAYOUTS else 20
    result = compare_layout(tensor, pipe, data, 4, extra, f"--zero-stage {stage}", context, steps=steps)
    check_fp64(result)
    assert result.weight <= 1e-10, "relative; the keys' biases move by rounding alone"


MODES = [
    "", "--muon-split-qkv-heads", "--muon-scale-mode original --muon-no-nesterov", ADAMUON, NORMUON,
    "--muon-coefficient-type quintic --muon-fp32-matmul-prec medium", f"{NORMUON} --muon-split-qkv-heads",
    "--muon-coefficient-type polar_express --muon-num-ns-steps 8 --muon-fp32-matmul-prec highest",
]  # fmt: skip


@pytest.mark.parametrize("extra", MODES)
@pytest.mark.slow
def test_modes_give_same_update_in_every_layout(extra: str) -> None:
    check_fp64(compare_layout(2, 1, 2, 4, f"{FP64} {GROUPED} {extra}", "--zero-stage 1", steps=20))


@pytest.mark.parametrize(("tensor", "pipe", "data", "stage", "context"), slow_but({(1, 2, 2, 1, 1)}))
@pytest.mark.parametrize("extra", [NORMUON, pytest.param(ADAMUON, marks=pytest.mark.slow)])
def test_adaptive_muon_matches_single_process_in_every_layout(
    tensor: int, pipe: int, data: int, stage: int, context: int, extra: str
) -> None:
    model = f"{FP64} {GROUPED if tensor < 4 else '--activation gated-silu'} {extra}"
    check_fp64(compare_layout(tensor, pipe, data, 4, model, f"--zero-stage {stage}", context, steps=3))


@pytest.mark.slow  # where main params are stored is tested for AdamW: tests/parity/test_zero_parts.py
@pytest.mark.parametrize("extra", ["--offload-optimizer", "--overlap-grad-reduce"])
def test_main_param_placement_does_not_change_update(extra: str) -> None:
    check_fp64(compare_layout(1, 1, 2, 4, FP64, f"--zero-stage 1 {extra}", steps=6))


def record_shapes(rank: int, argv: list[str], world_size: int) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices that this rank orthogonalizes in one step."""
    shapes: list[tuple[int, ...]] = []
    newton_schulz = muon.newton_schulz

    def record_shape(update: torch.Tensor, *args: Any) -> torch.Tensor:
        shapes.append(tuple(update.shape))
        return newton_schulz(update, *args)

    muon.newton_schulz = record_shape
    trace_rank(rank, argv, world_size, 1, 0)
    return shapes


@pytest.mark.parametrize(
    ("tensor", "data", "stage"),
    [(2, 2, 1), *(pytest.param(*e, marks=pytest.mark.slow) for e in [(1, 4, 0), (1, 2, 3)])],
)
def test_each_matrix_has_one_owner(tensor: int, data: int, stage: int) -> None:
    argv = make_flags(
        tensor,
        1,
        micro_batch_size=4,
        gas=1,
        extra=f"{FP64} {GROUPED} --zero-stage {stage} --lr-decay-style constant --warmup 0",
    )
    shapes_by_rank = run_ranks(tensor * data, record_shapes, argv, tensor * data)
    layer = [(32, 32), (16, 32), (16, 32), (32, 32), (128, 32), (128, 32), (32, 128)]
    assert sorted(shape for shapes in shapes_by_rank for shape in shapes) == sorted(4 * layer)
    assert all(shapes_by_rank), "no rank is idle"


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Return the full tensors of the newest checkpoint in ``folder``."""
    checkpoint = open_latest(folder / CHECKPOINTS, SINGLE)
    names = [name for name in checkpoint.names() if not name.startswith("rng/")]
    return {name: checkpoint.read(name, Shard(checkpoint.shape(name))) for name in names}


@pytest.mark.parametrize(
    ("pipe", "data", "extra"),
    [
        (1, 2, "--zero-stage 1"),
        *(
            pytest.param(*e, marks=pytest.mark.slow)
            for e in [
                (1, 1, ""),
                (2, 1, ""),
                (1, 2, ""),
                (1, 2, f"--zero-stage 1 {NORMUON}"),
                (1, 2, f"{ADAMUON}"),
                (1, 4, f"--zero-stage 1 {EXPERTS} {EP} 2"),
                (1, 4, f"--zero-stage 1 {EXPERTS} {EP} 2 {NORMUON}"),
                (1, 2, "--zero-stage 1 --bf16 --muon-coefficient-type polar_express"),
            ]
        ),
    ],
)
def test_resumed_run_is_bitwise_identical(pipe: int, data: int, extra: str, tmp_path: Path) -> None:
    dtype = "" if "--bf16" in extra else "--fp32"
    run_args = "gpt2", pipe, data, f"{dtype} {MUON} --hidden-dropout 0.1 {extra}", tmp_path
    uninterrupted = run_ranks(pipe * data, save_and_continue, *run_args)
    check_names_and_shapes(read_checkpoint(tmp_path))
    resumed = run_ranks(pipe * data, load_and_continue, *run_args)
    for (losses, weights), (losses_again, weights_again) in zip(uninterrupted, resumed, strict=True):
        assert losses_again == losses
        assert all(torch.equal(weights_again[name], weight) for name, weight in weights.items())


def check_names_and_shapes(saved: dict[str, torch.Tensor]) -> None:
    """Check that matrices have a momentum under their name, and other weights Adam's moments."""
    names = {name.split("/")[1] for name in saved if name.startswith("optimizer/")}
    assert names - {"moment2_buffer"} == {"momentum_buffer", "exp_avg", "exp_avg_sq"}
    name = "layers.0.attention.dense.weight"
    assert saved[f"optimizer/momentum_buffer/{name}"].shape == saved[f"weights/{name}"].shape
    assert saved[f"optimizer/momentum_buffer/{name}"].abs().max() > 0
    assert f"optimizer/exp_avg/{name}" not in saved
    assert "optimizer/momentum_buffer/embedding.word.weight" not in saved


MOVES = [((1, 2, f"--zero-stage 1 {NORMUON}"), (1, 1, NORMUON)), ((1, 1, ""), (1, 2, "--zero-stage 3"))]
SLOW_MOVES = [
    ((2, 1, ""), (1, 2, "--zero-stage 2")), ((1, 2, "--zero-stage 3"), (2, 1, "")),
    ((1, 1, ADAMUON), (1, 2, f"--zero-stage 1 {ADAMUON}")), ((2, 1, NORMUON), (1, 2, NORMUON)),
    ((1, 4, f"--zero-stage 1 {EXPERTS} {EP} 2 {NORMUON}"), (1, 1, f"{EXPERTS} {NORMUON}")),
    ((1, 2, f"{EXPERTS} {EP} 2"), (1, 4, f"--zero-stage 1 {EXPERTS} {EP} 2")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("saved", "loaded"), [MOVES[0], *(pytest.param(*e, marks=pytest.mark.slow) for e in [MOVES[1], *SLOW_MOVES])]
)
def test_state_loads_into_other_layouts(saved: Any, loaded: Any, tmp_path: Path) -> None:
    uninterrupted = run_ranks(
        saved[0] * saved[1], save_and_continue, "gpt2", *saved[:2], f"{FP64} {saved[2]}", tmp_path
    )
    for losses, _ in run_ranks(
        loaded[0] * loaded[1], load_and_continue, "gpt2", *loaded[:2], f"{FP64} {loaded[2]}", tmp_path
    ):
        assert [float.fromhex(loss) for loss in losses] == pytest.approx(
            [float.fromhex(loss) for loss in uninterrupted[0][0]], abs=1e-12, rel=0
        )


def load_other_optimizer_state(rank: int, folder: Path) -> tuple[str, int]:
    """Return the error of a start with another optimizer's state, and the steps of a start with --no-load-optim."""
    save_and_continue(rank, "gpt2", 1, 1, "--fp32 --optimizer adamw", folder)
    with pytest.raises(CheckpointError) as excinfo:
        load_and_continue(rank, "gpt2", 1, 1, f"--fp32 {MUON}", folder)
    losses, _ = load_and_continue(rank, "gpt2", 1, 1, f"--fp32 {MUON} --load {folder} --no-load-optim", folder)
    return str(excinfo.value), len(losses)


def test_other_optimizer_state_is_rejected_with_remedy(tmp_path: Path) -> None:
    ((text, steps),) = run_ranks(1, load_other_optimizer_state, tmp_path)
    assert "got --optimizer muon and adamw in " in text and "add --no-load-optim" in text
    assert steps == 2
