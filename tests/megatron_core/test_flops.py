"""Our FLOPs per sample and those of Megatron-LM's training program, for random models described by its flags.

Megatron-LM counts matrix products only. We count 6 FLOPs per parameter that a token uses (2 in forward, 4 in backward),
so ours are higher by 6 times the parameters that are no matrices of its products: norms, biases, routers. The gates of
shared experts are counted by us only, and rows that pad the vocabulary by Megatron-LM only. None of these differences
is a fault; they are below 1 % for models of usual sizes.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron.arguments.other_programs import GPT
from megatron.config import parse
from megatron.models.registry import costs_of

NUM_MODELS = 100


def draw_model(generator: random.Random) -> dict[str, Any]:
    """Return random flags of a model, by names with underscores; True for a flag without a value."""
    heads = generator.choice((4, 8, 16))
    flags = {
        "num_layers": generator.randint(1, 9), "hidden_size": heads * generator.choice((16, 24, 64)),
        "num_attention_heads": heads, "seq_length": generator.choice((32, 100, 512)),
        "vocab_size": 128 * generator.randint(1, 40), "disable_bias_linear": True,
    }  # fmt: skip
    flags["max_position_embeddings"] = flags["seq_length"]
    flags["ffn_hidden_size"] = 8 * generator.randint(1, 300)
    for name in ("swiglu", "untie_embeddings_and_output_weights", "attention_output_gate"):
        if generator.random() < 0.4:
            flags[name] = True
    if generator.random() < 0.4:
        flags |= {"position_embedding_type": "rope", "normalization": "RMSNorm"}
    if generator.random() < 0.25 and "attention_output_gate" not in flags:
        flags |= {
            "multi_latent_attention": True, "kv_lora_rank": 24, "qk_head_dim": 20, "qk_pos_emb_head_dim": 8,
            "v_head_dim": 12, "position_embedding_type": "rope", "normalization": "RMSNorm",
        }  # fmt: skip
        flags |= {"q_lora_rank": 40} if generator.random() < 0.5 else {}
    else:
        flags |= {"kv_channels": generator.choice((8, 40, 64))} if generator.random() < 0.5 else {}
        flags |= {"group_query_attention": True, "num_query_groups": heads // 4} if generator.random() < 0.5 else {}
    if generator.random() < 0.5:
        flags |= {"num_experts": 8, "moe_router_topk": generator.randint(2, 4), "moe_aux_loss_coeff": 0.0}
        flags |= {"moe_ffn_hidden_size": 48} if generator.random() < 0.5 else {}
        flags |= {"moe_shared_expert_intermediate_size": 56} if generator.random() < 0.5 else {}
        if generator.random() < 0.5:
            flags["moe_layer_freq"] = generator.choice((1, 2, 3))
    if generator.random() < 0.3:
        flags["mtp_num_layers"] = generator.randint(1, 2)
    return flags


def megatron_flops(flags: dict[str, Any]) -> float:
    """Return the FLOPs of a sample in forward and backward by Megatron-LM's rule.

    Source: Megatron-LM, megatron/training/training.py, ``num_floating_point_operations``, in August 2026.
    """
    h, s, heads = flags["hidden_size"], flags["seq_length"], flags["num_attention_heads"]
    depths = flags.get("mtp_num_layers", 0)
    frequency = flags.get("moe_layer_freq", 1) if "num_experts" in flags else 0
    are_experts = [bool(frequency) and layer % frequency == 0 for layer in range(flags["num_layers"])]
    are_experts += [are_experts[-1]] * depths
    matrices = 3 if "swiglu" in flags else 2
    ffn = flags["ffn_hidden_size"]
    expert_width = flags.get("moe_router_topk", 0) * flags.get("moe_ffn_hidden_size", ffn)
    expert_width += flags.get("moe_shared_expert_intermediate_size", 0)
    if "multi_latent_attention" in flags:
        query, value, latent = flags["qk_head_dim"] + flags["qk_pos_emb_head_dim"], flags["v_head_dim"], 0
        latent = flags["kv_lora_rank"] * (h + heads * (flags["qk_head_dim"] + value) + 1)
        rank = flags.get("q_lora_rank")
        queries = heads * query * h if rank is None else rank * (h + heads * query + 1)
        projections = queries + latent + h * flags["qk_pos_emb_head_dim"] + heads * value * h
        scores = heads * (query + value) / 2
    else:
        width = flags.get("kv_channels", h // heads) * heads
        keys = width * flags.get("num_query_groups", heads) // heads
        gates = width if "attention_output_gate" in flags else 0
        projections, scores = h * (width + 2 * keys + gates) + width * h, width
    layers = sum(projections + s * scores + matrices * h * (expert_width if e else ffn) for e in are_experts)
    head = h * flags["vocab_size"] * (1 + depths)
    return 6.0 * s * (layers + head + depths * (3 * h + 2 * h * h))


def num_uncounted_parameters(flags: dict[str, Any]) -> int:
    """Return the number of parameters that a token uses and that Megatron-LM's rule does not count."""
    h, depths = flags["hidden_size"], flags.get("mtp_num_layers", 0)
    norm = h if flags.get("normalization") == "RMSNorm" else 2 * h
    num_layers = flags["num_layers"] + depths
    frequency = flags.get("moe_layer_freq", 1) if "num_experts" in flags else 0
    are_experts = [bool(frequency) and layer % frequency == 0 for layer in range(flags["num_layers"])]
    num_routers = sum(are_experts) + are_experts[-1] * depths
    mtp_norms = depths * (3 * norm - 3 * h)  # Megatron-LM counts 3 h, whatever the norm
    return num_layers * 2 * norm + norm + mtp_norms + num_routers * flags.get("num_experts", 0) * h


def our_flops(flags: dict[str, Any]) -> float:
    """Return our FLOPs of a sample, from our configuration of the same command line."""
    argv = ["--micro-batch-size", "1", "--train-iters", "1", "--data-path", "none", "--device", "cpu"]
    for name, value in flags.items():
        argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    config = parse(argv, world_size=1, family="gpt2", defaults=GPT)
    return costs_of(config).flops_per_sample


def test_flops_equal_megatrons_and_those_of_small_parameters() -> None:
    generator = random.Random(0)
    for _ in range(NUM_MODELS):
        flags = draw_model(generator)
        expected = megatron_flops(flags) + 6.0 * flags["seq_length"] * num_uncounted_parameters(flags)
        assert our_flops(flags) == pytest.approx(expected, rel=1e-12), flags


def test_difference_is_small_for_llama_8b() -> None:
    flags = {
        "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "group_query_attention": True,
        "num_query_groups": 8, "ffn_hidden_size": 14336, "swiglu": True, "seq_length": 8192, "vocab_size": 128256,
        "max_position_embeddings": 8192, "untie_embeddings_and_output_weights": True, "disable_bias_linear": True,
        "position_embedding_type": "rope", "normalization": "RMSNorm",
    }  # fmt: skip
    assert our_flops(flags) == pytest.approx(megatron_flops(flags), rel=1e-4)
