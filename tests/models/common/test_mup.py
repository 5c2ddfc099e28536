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
from megatron.models.common.language_model import head_output, logits_of
from megatron.mpu.groups import single_grid
from megatron.training import optimizer_setup, setup
from megatron.training.world import World
from tests.helpers.layouts import check_fp64, difference

LINE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --vocab-size 101 --data-path none "
    "--device cpu --train-iters 4 --fp32 --hidden-bias --untie-embeddings-and-output-weights --lr 1e-2 --min-lr 1e-3"
)
WORLD = World("cpu", torch.device("cpu"), single_grid(), 0)


def config_of(extra: str, family: str = "gpt2") -> Any:
    return parse(f"{LINE} {extra}".split(), world_size=1, family=family, env={}).with_vocab(101)


def built(extra: str, family: str = "gpt2") -> tuple[DecoderModel, Any, Any]:
    """Return a model with its initial values, its optimizer, and the configuration."""
    config = config_of(extra, family)
    model = DecoderModel(model_args(config))
    setup.put_in_place(config, model, WORLD)
    return model, optimizer_setup.make_optimizer(config, model, WORLD), config


MATRICES = ("query_key_value.weight", "dense.weight", "up.weight", "down.weight", "router.weight", "gate.weight")


def is_hidden(name: str) -> bool:
    return name.startswith("layers.") and name.endswith(MATRICES)


EXPERTS = "--num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax --moe-shared-expert-intermediate-size 8 "
EXPERTS += "--moe-shared-expert-gate --disable-bias-linear"


@pytest.mark.parametrize(
    ("family", "words", "matrices"),
    [("gpt2", "", 4), ("llama", "--norm-epsilon 1e-5", 4), ("mpt", "", 4), ("llama", EXPERTS, 10)],
    ids=["gpt2", "llama", "mpt", "experts"],
)
def test_matrices_of_layers_start_smaller_and_learn_slower_and_nothing_else_does(
    family: str, words: str, matrices: int
) -> None:
    """By m = 4: sqrt(1/4) of the initial values, a quarter of rate and epsilon."""
    plain, _, _ = built(words, family)
    model, optimizer, config = built(f"{words} --mup-base-hidden-size 8", family)
    assert config.model.width_multiplier == 4
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    before, names = dict(plain.named_parameters()), dict(model.named_parameters())
    assert sum(map(is_hidden, names)) == 2 * matrices
    for name, parameter in names.items():
        wanted = before[name] * 0.5 if is_hidden(name) else before[name]
        torch.testing.assert_close(parameter, wanted, rtol=1e-6, atol=0)
        group, share = group_of[parameter], 0.25 if is_hidden(name) else 1.0
        assert group["lr"] == pytest.approx(1e-2 * share) and group["eps"] == pytest.approx(1e-8 * share), name
        assert group.get("floor_lr", 1e-3) == pytest.approx(1e-3 * share)


def test_a_rate_by_name_is_not_divided_and_the_other_matrices_are() -> None:
    model, optimizer, _ = built("--mup-base-hidden-size 8 --lr-by-name layers.*.up.weight=4e-3")
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = {name_of[id(p)]: (g["lr"], g.get("floor_lr", 1e-3)) for g in optimizer.param_groups for p in g["params"]}
    for name, rate in rates.items():
        is_named = name.endswith("up.weight")
        lr = 4e-3 if is_named else 2.5e-3 if is_hidden(name) else 1e-2
        assert rate == pytest.approx((lr, lr / 10)), name
    assert sum(rate[0] == 4e-3 for rate in rates.values()) == 2


def test_muons_matrices_keep_their_rate_and_the_others_have_none_to_divide() -> None:
    _, optimizer, _ = built("--optimizer muon --mup-base-hidden-size 8")
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2}


def losses(extra: str) -> list[float]:
    """Return the losses of three steps."""
    model, optimizer, _ = built(extra)
    tokens = torch.arange(24).view(3, 8) % 7
    found = []
    for _ in range(3):
        total, count = model(tokens, labels=tokens.roll(-1, 1), loss_mask=torch.ones(3, 8))
        (total / count).backward()
        optimizer.step()
        found.append(total.item())
    return found


def test_at_the_base_width_nothing_changes_to_the_bit() -> None:
    assert losses("--mup-base-hidden-size 32 --mup-base-head-dim 8 --embedding-multiplier 1") == losses("")
    assert losses("--dim-model-base 32") == losses("") != losses("--mup-base-hidden-size 16")


@pytest.mark.parametrize(
    ("words", "hidden", "head_scale"),
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
def test_megatrons_names_mean_what_they_mean_there(words: str, hidden: int, head_scale: float) -> None:
    model = config_of(words).model
    assert (model.mup_base_hidden_size, model.softmax_scale) == (hidden, pytest.approx(head_scale))


@pytest.mark.parametrize(
    ("words", "family", "message"),
    [
        ("--mup-base-hidden-size 8 --optimizer sgd", "gpt2", "scales learning rates for AdamW and Muon"),
        ("--mup-base-hidden-size 8 --dim-model-base 4", "gpt2", "both set the factor of the logits"),
        ("--mup-base-head-dim 4 --softmax-scale 0.5", "gpt2", "Remove one of them"),
        ("--mup-output-mult 0.5", "gpt2", "use --dim-model-base"),
        ("--mup-attn-scale-power 0.5", "gpt2", "--mup-attn-scale-power 0.5 is not supported"),
        ("--scaling-recipe depth_mup", "gpt2", "must be mup or none"),
    ],
)
def test_what_cannot_be_is_refused(words: str, family: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(words, family)
    assert message in str(refused.value)


@pytest.mark.parametrize("family", ["t5", "bert"])
def test_other_families_are_refused_with_the_reason(family: str) -> None:
    line = "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --vocab-size 200 --data-path none"
    for words in ("--mup-base-hidden-size 8", "--use-mup", "--residual-scale 2"):
        with pytest.raises(ConfigError, match="for decoders"):
            parse(f"{line} {words}".split(), world_size=1, family=family, env={})


def test_weights_of_another_base_width_are_of_another_model() -> None:
    """But where it is the width itself, or both name one factor of the logits."""
    saved = config_of("").identity()
    check_model(saved, config_of("--mup-base-hidden-size 32"))
    check_model({name: value for name, value in saved.items() if "mup" not in name}, config_of(""))
    with pytest.raises(CheckpointError, match="mup_base_hidden_size"):
        check_model(saved, config_of("--mup-base-hidden-size 16"))


def test_minicpms_factors_are_those_of_its_formula() -> None:
    model = config_of("--embedding-multiplier 12 --residual-scale 1.4 --dim-model-base 16").model
    assert model.residual_multiplier == 1.4 / math.sqrt(2) and model.logit_multiplier == 16 / 32
    assert model.width_multiplier == 1.0, "rates and initial values are muP's alone"


def test_text_is_generated_from_the_same_logits() -> None:
    model, _, config = built("--mup-base-hidden-size 8")
    x, sizes = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(1)), model_args(config)
    given = x, model.embedding.word.weight, sizes, model.place
    torch.testing.assert_close(logits_of(*given), (x @ model.embedding.word.weight.T) / 4)
    assert torch.equal(logits_of(*given), head_output(*given))


SCALED = "--fp64 --mup-base-hidden-size 8 --mup-base-head-dim 2 --embedding-multiplier 3 --residual-scale 1.4"


LAYOUTS = [
    (2, 1, 1, "--sequence-parallel --activation gated-silu"), (2, 2, 1, "--loss-chunk-tokens 5"),
    (1, 1, 2, "--zero-stage 3"), (2, 1, 2, "--zero-stage 1"), (1, 1, 2, "--optimizer muon --zero-stage 2"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data", "extra"), LAYOUTS)
def test_every_layout_trains_the_weights_of_one_process(tensor: int, pipe: int, data: int, extra: str) -> None:
    """Its sibling in the short run is in tests/optim/test_param_rates.py."""
    own = [word for word in extra.split() if word not in ("--sequence-parallel", "--zero-stage", "1", "2", "3")]
    more = " ".join(word for word in extra.split() if word not in own)
    found = difference(tensor, pipe, data, 4, f"{SCALED} {' '.join(own)}", more, steps=3)
    check_fp64(found)
    assert found.weight <= 1e-10
