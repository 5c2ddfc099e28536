"""muP and MiniCPM's scalings: initial values, rates, what they are together, and every layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.checkpoint.model_match import check_model
from megatron.config import parse
from megatron.errors import CheckpointError, ConfigError
from megatron.models.common.decoder import DecoderModel, model_args
from megatron.models.common.language_model import head_output, tied_head_logits
from megatron.mpu.groups import single_grid
from megatron.training import optimizer_setup, setup
from megatron.training.world import World
from tests.helpers.layouts import check_fp64, compare_layout

BASE_FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --vocab-size 101 --data-path none "
    "--device cpu --train-iters 4 --fp32 --hidden-bias --untie-embeddings-and-output-weights --lr 1e-2 --min-lr 1e-3"
)
WORLD = World("cpu", torch.device("cpu"), single_grid(), 0)


def make_config(extra: str, family: str = "gpt2") -> Any:
    return parse(f"{BASE_FLAGS} {extra}".split(), world_size=1, family=family, env={}).with_vocab(101)


def build(extra: str, family: str = "gpt2") -> tuple[DecoderModel, Any, Any]:
    """Return a model with its initial values, its optimizer, and the configuration."""
    config = make_config(extra, family)
    model = DecoderModel(model_args(config))
    setup.initialize_and_move(config, model, WORLD)
    return model, optimizer_setup.make_optimizer(config, model, WORLD), config


MATRIX_SUFFIXES = ("query_key_value.weight", "dense.weight", "up.weight", "down.weight", "router.weight", "gate.weight")


def is_hidden_matrix(name: str) -> bool:
    return name.startswith("layers.") and name.endswith(MATRIX_SUFFIXES)


EXPERT_FLAGS = "--num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax --moe-shared-expert-intermediate-size 8 "
EXPERT_FLAGS += "--moe-shared-expert-gate --disable-bias-linear"


@pytest.mark.parametrize(
    ("family", "flags", "num_matrices"),
    [("gpt2", "", 4), ("llama", "--norm-epsilon 1e-5", 4), ("mpt", "", 4), ("llama", EXPERT_FLAGS, 10)],
    ids=["gpt2", "llama", "mpt", "experts"],
)
def test_mup_scales_only_init_and_rate_of_hidden_matrices(family: str, flags: str, num_matrices: int) -> None:
    """By m = 4: sqrt(1/4) of the initial values, a quarter of rate and epsilon."""
    plain, _, _ = build(flags, family)
    model, optimizer, config = build(f"{flags} --mup-base-hidden-size 8", family)
    assert config.model.width_multiplier == 4
    group_by_param = {p: group for group in optimizer.param_groups for p in group["params"]}
    before, names = dict(plain.named_parameters()), dict(model.named_parameters())
    assert sum(map(is_hidden_matrix, names)) == 2 * num_matrices
    for name, parameter in names.items():
        expected = before[name] * 0.5 if is_hidden_matrix(name) else before[name]
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=0)
        group, factor = group_by_param[parameter], 0.25 if is_hidden_matrix(name) else 1.0
        assert group["lr"] == pytest.approx(1e-2 * factor) and group["eps"] == pytest.approx(1e-8 * factor), name
        assert group.get("floor_lr", 1e-3) == pytest.approx(1e-3 * factor)


def test_lr_by_name_overrides_mup_rate() -> None:
    model, optimizer, _ = build("--mup-base-hidden-size 8 --lr-by-name layers.*.up.weight=4e-3")
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = {name_of[id(p)]: (g["lr"], g.get("floor_lr", 1e-3)) for g in optimizer.param_groups for p in g["params"]}
    for name, rate in rates.items():
        is_named = name.endswith("up.weight")
        lr = 4e-3 if is_named else 2.5e-3 if is_hidden_matrix(name) else 1e-2
        assert rate == pytest.approx((lr, lr / 10)), name
    assert sum(rate[0] == 4e-3 for rate in rates.values()) == 2


def test_muon_uses_unscaled_rate() -> None:
    _, optimizer, _ = build("--optimizer muon --mup-base-hidden-size 8")
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2}


def train_losses(extra: str) -> list[float]:
    """Return the losses of three steps."""
    model, optimizer, _ = build(extra)
    tokens = torch.arange(24).view(3, 8) % 7
    step_losses = []
    for _ in range(3):
        total, count = model(tokens, labels=tokens.roll(-1, 1), loss_mask=torch.ones(3, 8))
        (total / count).backward()
        optimizer.step()
        step_losses.append(total.item())
    return step_losses


def test_base_width_leaves_losses_bitwise_equal() -> None:
    assert train_losses("--mup-base-hidden-size 32 --mup-base-head-dim 8 --embedding-multiplier 1") == train_losses("")
    assert train_losses("--dim-model-base 32") == train_losses("") != train_losses("--mup-base-hidden-size 16")


@pytest.mark.parametrize(
    ("flags", "base_hidden_size", "head_scale"),
    [
        ("--use-mup", 32, 1 / 8),
        ("--use-mup --mup-base-hidden-size 8", 8, 1 / 8),
        ("--scaling-recipe mup --scaling-base-hidden-size 8 --mup-base-head-dim 4", 8, 2 / 8),
        ("--use-mup --mup-base-hidden-size 8 --softmax-scale 0.3", 8, 0.3),
        ("--mup-base-hidden-size 8", 8, 0.0),
        ("--scaling-recipe none", 0, 0.0),
        ("--mup-base-hidden-size 8 --mup-output-mult 1 --mup-attn-scale-power 1 --mup-width-mult 4", 8, 0.0),
    ],
)
def test_megatron_mup_flags_map_to_settings(flags: str, base_hidden_size: int, head_scale: float) -> None:
    model = make_config(flags).model
    assert (model.mup_base_hidden_size, model.softmax_scale) == (base_hidden_size, pytest.approx(head_scale))


@pytest.mark.parametrize(
    ("flags", "family", "message"),
    [
        ("--mup-base-hidden-size 8 --optimizer sgd", "gpt2", "scales learning rates for AdamW and Muon"),
        ("--mup-base-hidden-size 8 --dim-model-base 4", "gpt2", "both set the factor of the logits"),
        ("--mup-base-head-dim 4 --softmax-scale 0.5", "gpt2", "Remove one of them"),
        ("--mup-output-mult 0.5", "gpt2", "use --dim-model-base"),
        ("--mup-attn-scale-power 0.5", "gpt2", "--mup-attn-scale-power 0.5 is not supported"),
        ("--scaling-recipe depth_mup", "gpt2", "must be mup or none"),
    ],
)
def test_rejects_conflicting_mup_flags(flags: str, family: str, message: str) -> None:
    with pytest.raises(ConfigError) as excinfo:
        make_config(flags, family)
    assert message in str(excinfo.value)


@pytest.mark.parametrize("family", ["t5", "bert"])
def test_rejects_mup_for_other_families(family: str) -> None:
    line = "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --vocab-size 200 --data-path none"
    for flags in ("--mup-base-hidden-size 8", "--use-mup", "--residual-scale 2"):
        with pytest.raises(ConfigError, match="in decoders only"):
            parse(f"{line} {flags}".split(), world_size=1, family=family, env={})


def test_checkpoint_of_other_base_width_is_rejected() -> None:
    """But where it is the width itself, or both name one factor of the logits."""
    saved = make_config("").identity()
    check_model(saved, make_config("--mup-base-hidden-size 32"))
    check_model({name: value for name, value in saved.items() if "mup" not in name}, make_config(""))
    with pytest.raises(CheckpointError, match="mup_base_hidden_size"):
        check_model(saved, make_config("--mup-base-hidden-size 16"))


def test_minicpm_factors_match_formula() -> None:
    model = make_config("--embedding-multiplier 12 --residual-scale 1.4 --dim-model-base 16").model
    assert model.residual_multiplier == 1.4 / math.sqrt(2) and model.logit_multiplier == 16 / 32
    assert model.width_multiplier == 1.0, "rates and initial values are muP's alone"


def test_generation_uses_scaled_logits() -> None:
    model, _, config = build("--mup-base-hidden-size 8")
    x, args = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(1)), model_args(config)
    head_args = x, model.embedding.word.weight, args, model.parallel
    torch.testing.assert_close(tied_head_logits(*head_args), (x @ model.embedding.word.weight.T) / 4)
    assert torch.equal(tied_head_logits(*head_args), head_output(*head_args))


SCALED_FLAGS = "--fp64 --mup-base-hidden-size 8 --mup-base-head-dim 2 --embedding-multiplier 3 --residual-scale 1.4"


LAYOUTS = [
    (2, 1, 1, "--sequence-parallel --activation gated-silu"), (2, 2, 1, "--loss-chunk-tokens 5"),
    (1, 1, 2, "--zero-stage 3"), (2, 1, 2, "--zero-stage 1"), (1, 1, 2, "--optimizer muon --zero-stage 2"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data", "extra"), LAYOUTS)
def test_every_layout_matches_one_process(tensor: int, pipe: int, data: int, extra: str) -> None:
    """Its sibling in the short run is in tests/optim/test_param_rates.py."""
    model_flags = [flag for flag in extra.split() if flag not in ("--sequence-parallel", "--zero-stage", "1", "2", "3")]
    layout_flags = " ".join(flag for flag in extra.split() if flag not in model_flags)
    result = compare_layout(tensor, pipe, data, 4, f"{SCALED_FLAGS} {' '.join(model_flags)}", layout_flags, steps=3)
    check_fp64(result)
    assert result.weight <= 1e-10
