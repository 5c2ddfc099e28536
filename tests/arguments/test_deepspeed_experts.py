"""The flags of Megatron-DeepSpeed's experts set our fields, with the defaults of DeepSpeed's layer."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.arguments.other_programs import GPT
from megatron.arguments.parser import parse
from megatron.config import Config
from megatron.errors import ConfigError

SIZES = "--num-layers 5 --hidden-size 16 --num-attention-heads 2 --vocab-size 9 --data-path none --seq-length 8"


def parse_line(line: str, world_size: int = 4) -> Config:
    return parse(f"{SIZES} {line}".split(), world_size=world_size, env={}, family="gpt2", defaults=GPT)


def expert_fields(config: Config) -> dict[str, Any]:
    names = (
        "num_experts", "moe_router_topk", "moe_router_pre_softmax", "moe_layer_freq", "moe_aux_loss_coeff",
        "moe_expert_capacity_factor", "moe_eval_capacity_factor", "moe_min_capacity", "moe_token_drop_policy",
    )  # fmt: skip
    fields = {name: getattr(config.model, name) for name in names}
    return {**fields, "expert_model_parallel_size": config.parallel.expert_model_parallel_size}


def test_published_flags_set_fields() -> None:
    config = parse_line(
        "--num-experts 8 --moe-expert-parallel-size 4 --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.5 "
        "--moe-eval-capacity-factor 2.0 --moe-min-capacity 3 --create-moe-param-group --use-tutel"
    )
    assert expert_fields(config) == {
        "num_experts": 8, "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_layer_freq": "[0,1,0,1,0]",
        "moe_aux_loss_coeff": 0.01, "moe_expert_capacity_factor": 1.5, "moe_eval_capacity_factor": 2.0,
        "moe_min_capacity": 3, "moe_token_drop_policy": "random", "expert_model_parallel_size": 4,
    }  # fmt: skip
    assert [note for note in config.notes if note.startswith("DeepSpeed's experts")]


def test_one_flag_brings_defaults_of_deepspeed() -> None:
    config = parse_line("--num-experts 8 --mlp-type standard")
    fields = expert_fields(config)
    assert fields["moe_aux_loss_coeff"] == 0.1 and fields["moe_min_capacity"] == 4
    assert fields["moe_expert_capacity_factor"] == fields["moe_eval_capacity_factor"] == 1.0
    assert expert_fields(parse_line("--num-experts 8"))["moe_layer_freq"] == "1", "Megatron's experts"


def test_two_experts_without_dropping() -> None:
    flags = "--topk 2 --disable-moe-token-dropping --disable-moe-top2-2nd-expert-sampling --expert-interval 1"
    fields = expert_fields(parse_line(f"--num-experts 8 {flags}"))
    assert fields["moe_router_topk"] == 2 and not fields["moe_router_pre_softmax"]
    assert fields["moe_expert_capacity_factor"] == 0.0 and fields["moe_layer_freq"] == "[1,1,1,1,1]"


def test_residual_type_adds_dense_layer_of_same_size() -> None:
    model = parse_line("--num-experts 8 --mlp-type residual --ffn-hidden-size 24").model
    assert model.moe_use_residual and model.moe_shared_expert_intermediate_size == model.moe_ffn_hidden_size == 24
    assert not parse_line("--num-experts 8 --mlp-type standard").model.moe_use_residual


def test_dense_model_ignores_flags() -> None:
    config = parse_line("--num-experts 1 --topk 1 --moe-loss-coeff 0.1 --mlp-type residual")
    assert set(config.ignored) >= {"--topk", "--moe-loss-coeff", "--mlp-type"}
    assert config.model.moe_aux_loss_coeff == 0


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--mlp-type other", "--mlp-type must be standard or residual, got 'other'"),
        ("--mlp-type residual --moe-shared-expert-gate", "--moe-use-residual exclude each other"),
        ("--topk 2", "--topk 2 needs --disable-moe-token-dropping"),
        ("--topk 2 --disable-moe-token-dropping", "--topk 2 needs --disable-moe-top2-2nd-expert-sampling"),
        ("--topk 1 --moe-router-topk 3", "--topk 1 must agree with --moe-router-topk 3"),
    ],
)
def test_other_results_are_rejected(flags: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_line(f"--num-experts 8 {flags}")
