"""The formula of MFU against torch's own count of the matrix products that a training step runs.

``torch.utils.flop_counter`` counts every matrix product of forward and backward, and nothing else. With the kernel of
attention that is made of plain products it relates to ours exactly:

    ours = counted - causal half + vectors

The causal half is 6 L a d s^2 of a sample of a decoder, which we do not count, for good kernels skip it; T5 and BERT
count whole matrices. Vectors are norms and biases of a decoder or BERT, 6 FLOPs each for a token, which the usual 6 N
counts among its parameters; T5's formula leaves them out. On a CPU, T5's attention without dropout goes by blocks that
skip part of the decoder's matrix, so here it has dropout.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import pretrain_gpt2
import pretrain_t5
from examples.bert import pretrain_bert
from examples.llama import pretrain_llama
from examples.mpt import pretrain_mpt
from megatron.config import Config
from megatron.config.experts import expert_layers
from megatron.models import registry
from megatron.training import initialize
from megatron.training.callbacks.speed_monitor import Rates
from megatron.training.mock_data import random_data
from megatron.training.parity import trace_steps
from tests.helpers.harness import run_ranks
from tests.helpers.runs import family_of, parse_script_config

SAMPLES, LENGTH, VOCAB = 2, 24, 109
COMMON_ARGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ff-hidden-size 48 --vocab-size 109 --batch-size 2 "
    "--gas 1 --attention-dropout 0.1 --hidden-dropout 0 --data-path none --device cpu --train-iters 1 --lr 1e-3 --fp32"
)
T5_LAYERS = "--enc-layers 2 --dec-layers 3 --vocab-extra-ids 8"
CASES: dict[str, tuple[ModuleType, str]] = {
    "gpt2": (pretrain_gpt2, "--seq-length 24 --hidden-bias"),
    "gpt2, untied, gated, wide heads": (
        pretrain_gpt2,
        "--seq-length 24 --untie-embeddings-and-output-weights --activation gated-gelu --kv-hidden-size 12",
    ),
    "llama": (pretrain_llama, "--seq-length 24 --num-query-groups 2"),
    "llama, tied, one group": (
        pretrain_llama,
        "--seq-length 24 --num-query-groups 1 --tie-embeddings-and-output-weights --hidden-bias",
    ),
    "llama, experts": (
        pretrain_llama,
        "--seq-length 24 --num-experts 6 --moe-router-topk 2 --moe-ffn-hidden-size 20 --moe-layer-freq [0,1] "
        "--moe-shared-expert-intermediate-size 12 --moe-shared-expert-gate --moe-aux-loss-coeff 0.1",
    ),
    "llama, residual experts": (
        pretrain_llama,
        "--seq-length 24 --num-experts 6 --moe-router-topk 1 --moe-router-pre-softmax --moe-ffn-hidden-size 20 "
        "--moe-layer-freq [0,1] --moe-use-residual",
    ),
    "mpt": (pretrain_mpt, "--seq-length 24"),
    "mpt, untied": (pretrain_mpt, "--seq-length 24 --untie-embeddings-and-output-weights"),
    "bert": (pretrain_bert, "--seq-length 24"),
    "bert, one head": (pretrain_bert, "--seq-length 24 --bert-no-binary-head"),
    "t5": (pretrain_t5, "--enc-seq-length 24"),
    "t5, untied, gated": (
        pretrain_t5,
        "--enc-seq-length 24 --activation gated-gelu --untie-embeddings-and-output-weights",
    ),
    "t5, learned positions": (
        pretrain_t5,
        "--enc-seq-length 24 --position-embedding-type learned --hidden-bias --activation gelu",
    ),
}  # fmt: skip


def count_flops(rank: int) -> dict[str, tuple[float, Config]]:
    """Return the products that a step of each case runs, and its configuration."""
    results: dict[str, tuple[float, Config]] = {}
    for name, (script, extra) in CASES.items():
        args = COMMON_ARGS if script is not pretrain_t5 else COMMON_ARGS.replace("--num-layers 2", T5_LAYERS)
        config = parse_script_config(script, [*args.split(), *extra.split()], 1).with_vocab(VOCAB)
        world = initialize.start(config)
        providers = (script.model_provider, script.forward_step)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            trace_steps(config, world, random_data(config), *providers, num_steps=1)
        results[name] = (float(counter.get_total_flops()), config)
    return results


@pytest.fixture(scope="module")
def counted_flops() -> dict[str, tuple[float, Config]]:
    (rank_results,) = run_ranks(1, count_flops)
    return rank_results


def causal_half(config: Config) -> float:
    """Return what of the products of a sample lies right of the diagonal, and is not counted by us."""
    model = config.model
    width = model.num_attention_heads * model.kv_hidden_size
    return 0.0 if config.family in ("bert", "t5") else 6.0 * model.num_layers * width * LENGTH**2


def vector_flops(config: Config) -> float:
    """Return 6 FLOPs for each number of norms and biases, and each token that goes through it."""
    model = config.model
    h, d, f = model.hidden_size, model.kv_hidden_size, model.ff_hidden_size
    if config.family_config.is_encoder_decoder:
        return 0.0
    norm = h if config.family in ("llama", "mpt") else 2 * h
    groups = model.num_query_groups
    gates = 2 if model.activation.startswith("gated-") else 1
    biases = (model.num_attention_heads + 2 * groups) * d + h + gates * f + h if model.hidden_bias else 0
    coefficients = 2 * sum(expert_layers(model.moe_layer_freq, model.num_layers)) if model.moe_use_residual else 0
    head_params = h + 2 if config.family == "bert" and config.family_config.binary_head else 0  # of one token
    return 6.0 * (LENGTH * (model.num_layers * (2 * norm + biases) + norm + coefficients) + head_params)


@pytest.mark.parametrize("name", CASES)
def test_flops_match_torch_flop_counter(name: str, counted_flops: dict[str, tuple[float, Config]]) -> None:
    flops, config = counted_flops[name]
    assert config.family == family_of(CASES[name][0])
    assert registry.costs_of(config).flops_per_sample == flops / SAMPLES - causal_half(config) + vector_flops(config)


@pytest.mark.parametrize("is_known", [True, False])
def test_mfu_is_flop_rate_over_peak_flops(
    is_known: bool, counted_flops: dict[str, tuple[float, Config]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of the user's own, whose parameters differ, 6 N are counted."""
    config, clock = counted_flops["gpt2"][1], [10.0]
    num_parameters = registry.costs_of(config).num_parameters + (not is_known)
    flops = registry.costs_of(config).flops_per_sample if is_known else 6.0 * num_parameters * LENGTH
    monkeypatch.setattr(
        "megatron.training.callbacks.speed_monitor.time", SimpleNamespace(perf_counter=lambda: clock[0])
    )
    rates = Rates(config, 1e9, [num_parameters, num_parameters])
    clock[0] += 3.0
    metrics = rates.drain(4, 4 * SAMPLES, pause_s=1.0, waited_s=0.5)
    assert metrics["mfu"] == pytest.approx(4 * SAMPLES * flops / 2.0 / 1e9)
    assert (metrics["step_s"], metrics["data_wait"]) == (0.5, 0.25)
    assert metrics["tokens_per_s"] == 4 * SAMPLES * LENGTH / 2.0
