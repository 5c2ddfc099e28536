"""Multi-latent attention: layouts of one layer, exchanged and saved bytes, costs, matrices and cache.

Formulas are in test_features.py, tensor ranks in test_tensor_ranks.py, context ranks in test_context_parallel.py, the
cache in test_cache.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config import parse
from megatron.config.model import ModelConfig
from megatron.costs.decoder_cost import DecoderCosts
from megatron.errors import ConfigError
from megatron.models.common.cache_slots import KVCacheSlots
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.kv_cache import LayerKVCache
from megatron.models.common.latent_attention import LatentAttention
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.groups import build_grid
from megatron.mpu.matrices import matrices_of
from megatron.mpu.topology import Topology
from megatron.ops.padded_heads import pad_heads
from megatron.planner.layout import Layout
from megatron.planner.machine import gpu_machine
from megatron.planner.time_model import CommunicationModel
from tests.helpers.count_bytes import count_saved_bytes, count_sent_bytes
from tests.helpers.harness import run_ranks
from tests.helpers.latent_samples import LATENT_FIELDS, latent_model_args
from tests.helpers.model_samples import BATCH, fill_weights
from tests.models.common.test_context_parallel import LONG_LENGTH, check_matches_one_process

FLAGS = (
    "--position-embedding-type rope --normalization RMSNorm --multi-latent-attention --num-attention-heads 4 "
    "--hidden-size 24 --vocab-size 64 --data-path none"
)


def test_sequence_parallel_matches_one_process() -> None:
    """The latents of a rank's tokens are gathered; their weights' gradients are sums over the tokens of all ranks."""
    check_matches_one_process(2, 1, "all_gather", ["latents", "latents with documents"])


def run_layer(rank: int, context: int, comm: str, num_bytes: str, has_gate: bool = False) -> float:
    """Return the bytes that a layer on this rank saves or sends over the context group."""
    grid = build_grid(Topology(pipe=1, data=1, tensor=1, context=context), rank)
    parallel = ParallelContext(context=grid.context, cp_comm_type=comm)
    args = latent_model_args(max_position_embeddings=LONG_LENGTH, attention_output_gate=has_gate)
    model = fill_weights(DecoderModel(args, parallel))
    x = torch.randn(LONG_LENGTH // context, BATCH, 16, requires_grad=True)
    mask = model.masks.get_mask(x, None)
    if num_bytes == "saved":
        with count_saved_bytes(model) as saved:
            y = model.layers[0](x, mask, None, None, None)
        del y
        return sum(saved.values())
    with count_sent_bytes(context) as sent:
        model.layers[0](x, mask, None, None, None).sum().backward()
    return sum(sent)


@pytest.mark.parametrize("comm", ["all_gather", "a2a"])
def test_layer_traffic_matches_planner(comm: str) -> None:
    head_ranks = (2 if comm == "a2a" else 1,)
    costs = DecoderCosts(latent_model_args(), LONG_LENGTH, context=2, head_ranks=head_ranks)
    layout = Layout(context=2, micro_batch_size=BATCH, dtype="fp32")
    expected = CommunicationModel(costs, gpu_machine("h100-80g")).context_traffic(layout).bytes
    assert run_ranks(2, run_layer, 2, comm, "sent") == [expected] * 2


def test_context_ranks_exchange_latents() -> None:
    """r_kv + d_r elements per token are gathered, and their gradients reduce-scattered."""
    message = LONG_LENGTH * BATCH * (5 + 4) * 4
    assert run_ranks(2, run_layer, 2, "all_gather", "sent") == [2 * message / 2] * 2


@pytest.mark.parametrize(
    ("context", "comm", "has_gate"),
    [(1, "all_gather", False), (2, "all_gather", False), (2, "a2a", False), (1, "all_gather", True)],
)
def test_saved_bytes_match_planner(context: int, comm: str, has_gate: bool) -> None:
    args = latent_model_args(attention_output_gate=has_gate)
    costs = DecoderCosts(
        args, LONG_LENGTH, mask_bytes=0, context=context, head_ranks=(context if comm == "a2a" else 1,)
    )
    (saved, *_) = run_ranks(context, run_layer, context, comm, "saved", has_gate)
    estimated = costs.unit_saved_bytes(BATCH, 1, 4)[1].full
    assert abs(estimated - saved) <= 0.1 * saved, (estimated, saved)


@pytest.mark.parametrize("has_gate", [False, True])
def test_flops_and_parameters_match_count_by_hand(has_gate: bool) -> None:
    config = ModelConfig(
        num_layers=1, hidden_size=16, num_attention_heads=4, vocab_size=11, ff_hidden_size=8, hidden_bias=False,
        multi_latent_attention=True, q_lora_rank=6, kv_lora_rank=5, qk_head_dim=3, qk_pos_emb_head_dim=2, v_head_dim=7,
        position_embedding_type="rope", normalization="RMSNorm", attention_output_gate=has_gate,
    )  # fmt: skip
    costs = DecoderCosts(config, 10)
    attention = 16 * 4 * has_gate + 16 * 6 + 6 + 6 * 4 * 5 + 16 * (5 + 2) + 5 + 5 * 4 * (3 + 7) + 4 * 7 * 16
    layer = attention + 2 * 16 * 8 + 2 * 16
    assert costs.layer_parameters() == layer
    per_token = 6 * (layer + 16 + 11 * 16) + 6 * 4 * (5 + 7) * 5  # a query sees 5 of 10 keys on average
    assert costs.flops_per_token() == pytest.approx(per_token)


def test_matrices_are_the_parts_of_heads() -> None:
    layer = LatentAttention(latent_model_args(), ParallelContext(), 0)
    shapes: dict[str, Any] = {
        name: matrices.shapes(parameter.shape)
        for name, parameter in layer.named_parameters()
        if (matrices := matrices_of(parameter)) is not None
    }
    assert shapes == {
        "query_down.weight": [(7, 16)],
        "query.weight": [(8 * 3, 7), (8 * 4, 7)],
        "key_value_down.weight": [(5, 16), (4, 16)],
        "key_value.weight": [(8 * 3, 5), (8 * 2, 5)],
        "dense.weight": [(16, 8 * 2)],
    }
    matrices = matrices_of(layer.key_value.weight)
    assert matrices is not None
    assert matrices.split(heads=True).shapes(layer.key_value.weight.shape) == [(3, 5), (2, 5)] * 8
    assert matrices.split(qkv=False).shapes(layer.key_value.weight.shape) == [(40, 5)]


def test_cache_has_one_latent_per_token() -> None:
    layer = LatentAttention(latent_model_args(), ParallelContext(), 0)
    slots = KVCacheSlots(capacity=9)
    slots.advance(torch.arange(6).expand(2, 6))
    cache = LayerKVCache(slots)
    with torch.no_grad():
        layer(torch.randn(6, 2, 16), None, cache)
    assert cache.self_attention is not None
    assert [tuple(tensor.shape) for tensor in cache.self_attention] == [(2, 1, 9, 5), (2, 1, 9, 4)]


@pytest.mark.parametrize(("key_size", "value_size"), [(6, 4), (4, 6), (5, 5)])
def test_padded_heads_equal_attention_of_unequal_sizes(key_size: int, value_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 3, 7, key_size, generator=generator, dtype=torch.float64) for _ in range(2))
    value = torch.randn(2, 3, 7, value_size, generator=generator, dtype=torch.float64)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        assert query.shape == key.shape == value.shape
        return torch.softmax(query @ key.transpose(2, 3) * 0.3, -1) @ value

    expected = torch.softmax(query @ key.transpose(2, 3) * 0.3, -1) @ value
    torch.testing.assert_close(pad_heads(attend)(query, key, value), expected, rtol=1e-13, atol=1e-13)


def test_all_problems_are_listed_at_once() -> None:
    bad_flags = "--qk-pos-emb-head-dim 7 --num-query-groups 2 --rotary-percent 0.5 --add-qkv-bias --qk-norm all"
    with pytest.raises(ConfigError) as error:
        parse(f"{FLAGS} {bad_flags} --model-parallel-size 3".split(), world_size=3)
    for part in (
        "--qk-pos-emb-head-dim must be even, because rotary positions rotate pairs of elements, got 7",
        "--num-query-groups 2 and --num-attention-heads 4",
        "--rotary-percent does not apply to --multi-latent-attention",
        "--multi-latent-attention does not support --add-qkv-bias, --qk-norm all",
        "--num-attention-heads",
    ):
        assert part in str(error.value), part


def test_unsupported_combinations_are_one_error() -> None:
    flags = (
        "--softmax-type learnable --no-rope-freq 2 --attention-temperature-scale 0.1 "
        "--window-size 3 --window-num-query-groups 1 --attention-value-scale 0.5 --qk-norm l2"
    )
    message = (
        "--multi-latent-attention does not support --qk-norm l2, --softmax-type learnable, "
        "--no-rope-freq 2, --attention-temperature-scale 0.1, --attention-value-scale 0.5, "
        "--window-num-query-groups 1. Remove"
    )
    with pytest.raises(ConfigError) as error:
        parse(f"{FLAGS} {flags}".split(), world_size=1)
    assert message in str(error.value)


def test_norms_of_heads_are_rejected_and_norms_of_latents_are_accepted() -> None:
    """Megatron's --qk-layernorm selects the norms of latents."""
    with pytest.raises(ConfigError, match="does not support --qk-norm head: its norms are those of the latents"):
        parse(f"{FLAGS} --qk-norm head".split(), world_size=1)
    config = parse(f"{FLAGS} --qk-layernorm".split(), world_size=1)
    assert config.model.qk_norm == "none"
    assert config.shadowed == {"--qk-layernorm": "with --multi-latent-attention, the latents always have norms"}


def test_longrope_has_a_factor_for_each_rotated_pair() -> None:
    flags = "--rotary-scaling longrope --rotary-short-factors [1.0] --rotary-long-factors [2.0]"
    with pytest.raises(
        ConfigError, match="needs one factor for each of the 32 rotated pairs of a head, got 1"
    ) as error:
        parse(f"{FLAGS} {flags}".split(), world_size=1)
    assert "--qk-pos-emb-head-dim" in str(error.value)


def test_rotary_positions_are_required() -> None:
    with pytest.raises(ConfigError, match="--multi-latent-attention needs --position-embedding-type rope"):
        parse("--multi-latent-attention --vocab-size 64 --data-path none".split(), world_size=1)


def test_query_and_key_size_is_the_sum_of_its_parts() -> None:
    args = latent_model_args()
    assert args.kv_hidden_size == LATENT_FIELDS["qk_head_dim"] + LATENT_FIELDS["qk_pos_emb_head_dim"]
    assert args.latent_norm_epsilon == args.layernorm_epsilon and args.attention_width == 8 * 2
