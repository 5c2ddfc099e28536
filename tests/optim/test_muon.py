"""Muon on one process: torch's own optimizer to the bit, which weights it moves, how owners share the work."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from megatron.config.newton_schulz import newton_schulz_flops
from megatron.models.common.decoder import DecoderModel
from megatron.mpu.matrices import matrices_of, set_matrices
from megatron.optim import MuonArgs, build_optimizer
from megatron.optim.matrix_owners import MatrixPartition, owners, runs_of
from megatron.optim.muon import SCALES as SCALE_MODES
from megatron.optim.param_rates import ParamRate
from megatron.torch_compat import newton_schulz
from tds.param_info import Matrices
from tests.helpers.model_samples import filled, small_sizes
from tests.helpers.whole import random

LR, DECAY = 0.02, 0.1
GROUPED = {"num_attention_heads": 4, "num_query_groups": 2, "activation": "gated-silu"}
ORIGINAL = MuonArgs(scale_mode="original", nesterov=False, momentum=0.8, num_ns_steps=3)
HEADS, AS_ONE = MuonArgs(split_qkv_heads=True), MuonArgs(split_qkv=False)
MODES = [MuonArgs(), ORIGINAL, HEADS, AS_ONE, MuonArgs(scale_mode="spectral", extra_scale_factor=0.2)]


def grouped_model() -> DecoderModel:
    return filled(DecoderModel(small_sizes(**GROUPED)))


def rows_of(name: str, sizes: Any, args: MuonArgs) -> list[list[int]]:
    """Return the rows of each matrix that the weight ``name`` holds, by the layout that attention's docstring has."""
    d, groups = sizes.kv_hidden_size, sizes.num_query_groups
    each = sizes.num_attention_heads // groups
    if name.endswith("query_key_value.weight"):
        heads = [list(range(head * d, head * d + d)) for head in range(groups * (each + 2))]
        if args.split_qkv_heads:
            return heads
        if not args.split_qkv:
            return [sum(heads, [])]
        places = [range(each), [each], [each + 1]]
        return [[row for g in range(groups) for p in place for row in heads[g * (each + 2) + p]] for place in places]
    if name.endswith("mlp.up.weight"):
        return [list(range(0, 2 * sizes.ff_hidden_size, 2)), list(range(1, 2 * sizes.ff_hidden_size, 2))]
    return []


def torch_settings(args: MuonArgs) -> dict[str, Any]:
    """Return what ``torch.optim.Muon`` takes for the same update."""
    kind = "original" if args.scale_mode == "original" else "match_rms_adamw"
    given = {"momentum": args.momentum, "nesterov": args.nesterov, "ns_steps": args.num_ns_steps}
    return {"lr": LR, "weight_decay": DECAY, "adjust_lr_fn": kind, **given}


@pytest.mark.parametrize("args", MODES, ids=["", "original", "heads", "as one", "spectral"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
def test_twenty_steps_are_those_of_torchs_muon_to_the_bit(args: MuonArgs, dtype: torch.dtype) -> None:
    """The reference holds query, key, value, gate and up as parameters of their own."""
    sizes = small_sizes(**GROUPED)
    model = grouped_model().to(dtype)
    optimizer = build_optimizer(model.parameters(), name="muon", lr=LR, weight_decay=DECAY, dtype=dtype, muon=args)
    apart: dict[str, list[tuple[list[int] | slice, nn.Parameter]]] = {}
    for name, weight in model.named_parameters():
        is_matrix = weight.dim() == 2 and name.startswith("layers.")
        rows = rows_of(name, sizes, args) if is_matrix else []
        pieces: list[Any] = rows or [slice(None)]
        apart[name] = [(piece, nn.Parameter(weight.detach()[piece].clone())) for piece in pieces]
    matrices = [p for n, parts in apart.items() if n.startswith("layers.") for _, p in parts if p.dim() == 2]
    moved = set(matrices)
    others = [p for parts in apart.values() for _, p in parts if p not in moved]
    decays = [{"params": [p for p in others if p.dim() == 2], "weight_decay": DECAY}]
    decays += [{"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0}]
    reference = [torch.optim.Muon(matrices, **torch_settings(args)), torch.optim.AdamW(decays, lr=LR, fused=True)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        for name, weight in model.named_parameters():
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=dtype)
            for piece, own in apart[name]:
                own.grad = weight.grad[piece].clone()
        optimizer.step()
        for each in reference:
            each.step()
    for name, weight in model.named_parameters():
        for piece, own in apart[name]:
            assert torch.equal(weight[piece], own), name


SCALES = {
    "match_rms_adamw": (0.2 * math.sqrt(8), 0.2 * math.sqrt(8)),
    "spectral": (math.sqrt(8), math.sqrt(8)),
    "original": (2.0, 1.0),
    "unit_rms_norm": (2.0, 0.5),
}
"""By mode: of a matrix [8, 2], and of one [2, 8]."""


@pytest.mark.parametrize("mode", SCALES)
@pytest.mark.parametrize("extra", [1.0, 0.3])
def test_an_update_is_scaled_by_the_formula_of_its_mode(mode: str, extra: float) -> None:
    """The first step without decay moves by the rate times the scale times the orthogonalised gradient."""
    args = MuonArgs(scale_mode=mode, extra_scale_factor=extra)
    shapes = [(8, 2), (2, 8)]
    weights = [set_matrices(nn.Parameter(random(seed, *shape).float())) for seed, shape in enumerate(shapes)]
    before = [weight.detach().clone() for weight in weights]
    grads = [random(10 + seed, *shape).float() for seed, shape in enumerate(shapes)]
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad.clone()
    build_optimizer(weights, name="muon", lr=LR, muon=args).step()
    assert set(SCALES) == set(SCALE_MODES)
    for shape, wanted, weight, old, grad in zip(shapes, SCALES[mode], weights, before, grads, strict=True):
        assert args.scale(*shape) == pytest.approx(extra * wanted)
        moved = (old - weight.detach()) / (LR * extra * wanted)
        assert (moved - newton_schulz(grad.bfloat16()).float()).abs().max() <= 5e-2


def test_a_group_of_rate_0_stays_and_the_others_move() -> None:
    """Next to each other in one run of weights, which is skipped only where no weight of it has a rate."""
    weights = [set_matrices(nn.Parameter(random(seed, 4, 6).float())) for seed in range(3)]
    rates = {weights[0]: ParamRate("still", 0.0, 0.0)}
    optimizer = build_optimizer(weights, name="muon", lr=LR, weight_decay=DECAY, rates=rates)
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(weights, before, strict=True)] == [True, False, False]
    assert all(optimizer.inner.state[weight]["momentum_buffer"].any() for weight in weights)


def test_matrices_of_layers_go_by_muon_and_all_else_by_adamw() -> None:
    model = filled(DecoderModel(small_sizes(untie_embeddings=True)))
    optimizer = build_optimizer(model.parameters(), name="muon")
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    by_muon = {name_of[id(p)] for g in optimizer.param_groups if g["is_muon"] for p in g["params"]}
    kinds = {"attention.query_key_value", "attention.dense", "mlp.up", "mlp.down"}
    layers = {name.split(".")[1] for name in name_of.values() if name.startswith("layers.")}
    assert by_muon == {f"layers.{layer}.{kind}.weight" for layer in layers for kind in kinds}
    optimizer.step()
    keys = {key for p in model.parameters() for key in optimizer.inner.state[p]}
    assert keys == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    assert all(
        set(optimizer.inner.state[p]) == {"momentum_buffer"}
        for g in optimizer.param_groups
        if g["is_muon"]
        for p in g["params"]
    )


def test_packed_rows_go_to_their_matrices() -> None:
    rows = torch.arange(12.0).unsqueeze(1)
    packed = Matrices((2, 1, 1), head=1)
    found = [view.flatten().tolist() for view in packed.views(rows)]
    assert found == [[0, 1, 4, 5, 8, 9], [2, 6, 10], [3, 7, 11]]
    assert packed.shapes((12, 5)) == [(6, 5), (3, 5), (3, 5)]
    assert packed.split(qkv=False).shapes((12, 5)) == [(12, 5)]
    assert packed.split(heads=True).shapes((12, 5)) == [(1, 5)] * 12
    assert Matrices((1, 1)).split(qkv=False, heads=True).shapes((12, 5)) == [(6, 5)] * 2, "gate and up are no heads"
    with pytest.raises(ValueError, match="multiple of 4, got 10"):
        packed.views(torch.ones(10, 1))
    weight = nn.Parameter(torch.ones(2, 2))
    assert matrices_of(weight) is None
    assert matrices_of(set_matrices(weight)) == Matrices()


def test_owners_have_as_much_to_do_as_each_other() -> None:
    shapes = [(96, 32), (32, 32), (128, 32), (32, 128)] * 12
    costs = [newton_schulz_flops(*shape) for shape in shapes]
    for number in (1, 2, 4, 7):
        found = owners(costs, number)
        load = [sum(cost for cost, owner in zip(costs, found, strict=True) if owner == one) for one in range(number)]
        assert sum(load) == sum(costs)
        assert max(load) - min(load) <= max(costs)
    assert owners([5, 1, 1, 1, 1, 1], 2) == [0, 1, 1, 1, 1, 1]


def test_a_matrix_costs_what_its_products_do() -> None:
    assert newton_schulz_flops(3, 7, steps=2) == 2 * (2 * 3 * 7 * 3 + 2 * 3 * 3 * 3 + 2 * 3 * 3 * 7)
    assert newton_schulz_flops(7, 3) == newton_schulz_flops(3, 7)


def test_weights_travel_in_runs_of_few_numbers_for_an_owner() -> None:
    cuts = [MatrixPartition((4, 4), None, None)] * 5
    assert list(runs_of(cuts, 2, 16)) == [range(2), range(2, 4), range(4, 5)]
    assert list(runs_of(cuts, 1, 1)) == [range(n, n + 1) for n in range(5)], "one that is too large goes alone"
    assert list(runs_of([], 2)) == []


def test_making_its_state_moves_no_weight() -> None:
    from megatron.training.state_records import make_moments

    model = grouped_model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = build_optimizer(model.parameters(), name="muon", lr=LR, weight_decay=DECAY)
    make_moments(optimizer)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(not optimizer.inner.state[p]["momentum_buffer"].any() for p in optimizer.param_groups[0]["params"])


def test_a_state_dict_goes_on_with_the_same_bits() -> None:
    """What checkpoints in DeepSpeed's layout hold."""

    def stepped(optimizer: Any, model: DecoderModel, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        optimizer.step()

    one, other = grouped_model(), grouped_model()
    optimizers = [build_optimizer(model.parameters(), name="muon", lr=LR) for model in (one, other)]
    stepped(optimizers[0], one, 1)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for optimizer, model in zip(optimizers, (one, other), strict=True):
        stepped(optimizer, model, 2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
