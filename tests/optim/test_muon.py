"""Muon on one process: bitwise equality with torch's optimizer, the weights that it updates, and the owners' work."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from megatron.config.newton_schulz import newton_schulz_flops, step_coefficients
from megatron.models.common.decoder import DecoderModel
from megatron.mpu.matrices import matrices_of, set_matrices
from megatron.optim import MuonArgs, build_optimizer
from megatron.optim.matrix_owners import MatrixPartition, assign_owners, exchange_batches
from megatron.optim.muon import SCALES as SCALE_MODES
from megatron.optim.newton_schulz import newton_schulz
from megatron.optim.param_rates import ParamRate
from tds.param_info import Matrices
from tests.helpers.model_samples import fill_weights, small_model_args
from tests.helpers.whole import random_tensor

LR, DECAY = 0.02, 0.1
GROUPED = {"num_attention_heads": 4, "num_query_groups": 2, "activation": "gated-silu"}
ORIGINAL = MuonArgs(scale_mode="original", nesterov=False, momentum=0.8, num_ns_steps=3)
SPLIT_HEADS, UNSPLIT = MuonArgs(split_qkv_heads=True), MuonArgs(split_qkv=False)
MODES = [MuonArgs(), ORIGINAL, SPLIT_HEADS, UNSPLIT, MuonArgs(scale_mode="spectral", extra_scale_factor=0.2)]


def grouped_model() -> DecoderModel:
    return fill_weights(DecoderModel(small_model_args(**GROUPED)))


def matrix_rows(name: str, model_args: Any, args: MuonArgs) -> list[list[int]]:
    """Return the rows of each matrix in the weight ``name``, by the layout in attention's docstring."""
    d, groups = model_args.kv_hidden_size, model_args.num_query_groups
    heads_per_group = model_args.num_attention_heads // groups
    if name.endswith("query_key_value.weight"):
        heads = [list(range(head * d, head * d + d)) for head in range(groups * (heads_per_group + 2))]
        if args.split_qkv_heads:
            return heads
        if not args.split_qkv:
            return [sum(heads, [])]
        head_ranges = [range(heads_per_group), [heads_per_group], [heads_per_group + 1]]
        return [
            [row for g in range(groups) for p in head_range for row in heads[g * (heads_per_group + 2) + p]]
            for head_range in head_ranges
        ]
    if name.endswith("mlp.up.weight"):
        return [list(range(0, 2 * model_args.ff_hidden_size, 2)), list(range(1, 2 * model_args.ff_hidden_size, 2))]
    return []


def torch_muon_settings(args: MuonArgs) -> dict[str, Any]:
    """Return the arguments of ``torch.optim.Muon`` for the same update."""
    adjust_mode = "original" if args.scale_mode == "original" else "match_rms_adamw"
    settings = {"momentum": args.momentum, "nesterov": args.nesterov, "ns_steps": args.num_ns_steps}
    return {"lr": LR, "weight_decay": DECAY, "adjust_lr_fn": adjust_mode, **settings}


@pytest.mark.parametrize("args", MODES, ids=["", "original", "heads", "as one", "spectral"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
def test_steps_match_torch_muon_bitwise(args: MuonArgs, dtype: torch.dtype) -> None:
    """The reference has query, key, value, gate and up as separate parameters."""
    model_args = small_model_args(**GROUPED)
    model = grouped_model().to(dtype)
    optimizer = build_optimizer(model.parameters(), name="muon", lr=LR, weight_decay=DECAY, dtype=dtype, muon=args)
    reference_params: dict[str, list[tuple[list[int] | slice, nn.Parameter]]] = {}
    for name, weight in model.named_parameters():
        is_matrix = weight.dim() == 2 and name.startswith("layers.")
        rows = matrix_rows(name, model_args, args) if is_matrix else []
        row_groups: list[Any] = rows or [slice(None)]
        reference_params[name] = [
            (row_group, nn.Parameter(weight.detach()[row_group].clone())) for row_group in row_groups
        ]
    matrices = [
        p for n, entries in reference_params.items() if n.startswith("layers.") for _, p in entries if p.dim() == 2
    ]
    muon_params = set(matrices)
    adamw_params = [p for entries in reference_params.values() for _, p in entries if p not in muon_params]
    adamw_groups = [{"params": [p for p in adamw_params if p.dim() == 2], "weight_decay": DECAY}]
    adamw_groups += [{"params": [p for p in adamw_params if p.dim() < 2], "weight_decay": 0.0}]
    reference = [
        torch.optim.Muon(matrices, **torch_muon_settings(args)),
        torch.optim.AdamW(adamw_groups, lr=LR, fused=True),
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        for name, weight in model.named_parameters():
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=dtype)
            for row_group, reference_param in reference_params[name]:
                reference_param.grad = weight.grad[row_group].clone()
        optimizer.step()
        for reference_optimizer in reference:
            reference_optimizer.step()
    for name, weight in model.named_parameters():
        for row_group, reference_param in reference_params[name]:
            assert torch.equal(weight[row_group], reference_param), name


EXPECTED_SCALES = {
    "match_rms_adamw": (0.2 * math.sqrt(8), 0.2 * math.sqrt(8)),
    "spectral": (math.sqrt(8), math.sqrt(8)),
    "original": (2.0, 1.0),
    "unit_rms_norm": (2.0, 0.5),
}
"""Mode -> scale of a matrix [8, 2], and of a matrix [2, 8]."""


@pytest.mark.parametrize("mode", EXPECTED_SCALES)
@pytest.mark.parametrize("extra", [1.0, 0.3])
def test_update_scale_follows_mode_formula(mode: str, extra: float) -> None:
    """The first step without decay moves by the rate times the scale times the orthogonalised gradient."""
    args = MuonArgs(scale_mode=mode, extra_scale_factor=extra)
    shapes = [(8, 2), (2, 8)]
    weights = [set_matrices(nn.Parameter(random_tensor(seed, *shape).float())) for seed, shape in enumerate(shapes)]
    before = [weight.detach().clone() for weight in weights]
    grads = [random_tensor(10 + seed, *shape).float() for seed, shape in enumerate(shapes)]
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad.clone()
    build_optimizer(weights, name="muon", lr=LR, muon=args).step()
    assert set(EXPECTED_SCALES) == set(SCALE_MODES)
    for shape, expected, weight, old, grad in zip(shapes, EXPECTED_SCALES[mode], weights, before, grads, strict=True):
        assert args.scale(*shape) == pytest.approx(extra * expected)
        update = (old - weight.detach()) / (LR * extra * expected)
        assert (update - newton_schulz(grad, step_coefficients("simple", 5)).float()).abs().max() <= 5e-2


def test_zero_rate_group_stays_fixed_and_others_move() -> None:
    """All weights are in one exchange batch, which is skipped only if all its learning rates are 0."""
    weights = [set_matrices(nn.Parameter(random_tensor(seed, 4, 6).float())) for seed in range(3)]
    rates = {weights[0]: ParamRate("still", 0.0, 0.0)}
    optimizer = build_optimizer(weights, name="muon", lr=LR, weight_decay=DECAY, rates=rates)
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(weights, before, strict=True)] == [True, False, False]
    assert all(optimizer.inner.state[weight]["momentum_buffer"].any() for weight in weights)


def test_layer_matrices_use_muon_and_others_use_adamw() -> None:
    model = fill_weights(DecoderModel(small_model_args(untie_embeddings=True)))
    optimizer = build_optimizer(model.parameters(), name="muon")
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    muon_names = {name_of[id(p)] for g in optimizer.param_groups if g["is_muon"] for p in g["params"]}
    matrix_names = {"attention.query_key_value", "attention.dense", "mlp.up", "mlp.down"}
    layers = {name.split(".")[1] for name in name_of.values() if name.startswith("layers.")}
    assert muon_names == {f"layers.{layer}.{matrix_name}.weight" for layer in layers for matrix_name in matrix_names}
    optimizer.step()
    keys = {key for p in model.parameters() for key in optimizer.inner.state[p]}
    assert keys == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    assert all(
        set(optimizer.inner.state[p]) == {"momentum_buffer"}
        for g in optimizer.param_groups
        if g["is_muon"]
        for p in g["params"]
    )


def test_packed_rows_are_split_into_matrices() -> None:
    rows = torch.arange(12.0).unsqueeze(1)
    packed = Matrices((2, 1, 1), head=1)
    views = [view.flatten().tolist() for view in packed.views(rows)]
    assert views == [[0, 1, 4, 5, 8, 9], [2, 6, 10], [3, 7, 11]]
    assert packed.shapes((12, 5)) == [(6, 5), (3, 5), (3, 5)]
    assert packed.split(qkv=False).shapes((12, 5)) == [(12, 5)]
    assert packed.split(heads=True).shapes((12, 5)) == [(1, 5)] * 12
    assert Matrices((1, 1)).split(qkv=False, heads=True).shapes((12, 5)) == [(6, 5)] * 2, "gate and up are no heads"
    with pytest.raises(ValueError, match="multiple of 4, got 10"):
        packed.views(torch.ones(10, 1))
    weight = nn.Parameter(torch.ones(2, 2))
    assert matrices_of(weight) is None
    assert matrices_of(set_matrices(weight)) == Matrices()


def test_owners_share_work_evenly() -> None:
    shapes = [(96, 32), (32, 32), (128, 32), (32, 128)] * 12
    costs = [newton_schulz_flops(*shape) for shape in shapes]
    for num_owners in (1, 2, 4, 7):
        assignment = assign_owners(costs, num_owners)
        loads = [
            sum(cost for cost, owner in zip(costs, assignment, strict=True) if owner == owner_idx)
            for owner_idx in range(num_owners)
        ]
        assert sum(loads) == sum(costs)
        assert max(loads) - min(loads) <= max(costs)
    assert assign_owners([5, 1, 1, 1, 1, 1], 2) == [0, 1, 1, 1, 1, 1]


def test_newton_schulz_flops_count_matmuls() -> None:
    assert newton_schulz_flops(3, 7, steps=2) == 2 * (2 * 3 * 7 * 3 + 2 * 3 * 3 * 3 + 2 * 3 * 3 * 7)
    assert newton_schulz_flops(7, 3) == newton_schulz_flops(3, 7)


def test_exchange_batches_are_limited_in_size() -> None:
    partitions = [MatrixPartition((4, 4), None, None)] * 5
    assert list(exchange_batches(partitions, 2, 16)) == [range(2), range(2, 4), range(4, 5)]
    assert list(exchange_batches(partitions, 1, 1)) == [range(n, n + 1) for n in range(5)], (
        "a matrix that is too large has its own batch"
    )
    assert list(exchange_batches([], 2)) == []


def test_making_state_moves_no_weight() -> None:
    from megatron.training.state_records import make_moments

    model = grouped_model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = build_optimizer(model.parameters(), name="muon", lr=LR, weight_decay=DECAY)
    make_moments(optimizer)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(not optimizer.inner.state[p]["momentum_buffer"].any() for p in optimizer.param_groups[0]["params"])


def test_state_dict_resumes_bitwise() -> None:
    """Checkpoints in DeepSpeed's format store this state dict."""

    def run_step(optimizer: Any, model: DecoderModel, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        optimizer.step()

    first_model, second_model = grouped_model(), grouped_model()
    optimizers = [build_optimizer(model.parameters(), name="muon", lr=LR) for model in (first_model, second_model)]
    run_step(optimizers[0], first_model, 1)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for optimizer, model in zip(optimizers, (first_model, second_model), strict=True):
        run_step(optimizer, model, 2)
    assert all(torch.equal(a, b) for a, b in zip(first_model.parameters(), second_model.parameters(), strict=True))
