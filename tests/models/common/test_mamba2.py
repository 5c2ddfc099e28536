"""Mamba2: transformers' mixers, documents, tensor and context ranks, caches, weight decay and 16-bit weights."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megatron.models.common.cache_slots import KVCacheSlots
from megatron.models.common.mamba2 import Mamba2
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.recurrent_cache import RecurrentCache
from megatron.mpu.context_parallel import split_along_context, to_sequence_order
from megatron.mpu.groups import Group
from megatron.mpu.mappings import all_reduce
from megatron.mpu.shard import is_partial, shard_of
from megatron.ops.document_attention import document_starts
from megatron.optim.gradients.sum_group import SumGroup
from megatron.optim.param_groups import decay_groups
from tests.helpers.documents import segment_ids_from_lengths
from tests.helpers.harness import run_ranks
from tests.helpers.mamba_samples import FALCON_MULTIPLIERS, mamba_model_args
from tests.helpers.model_samples import (
    ShardedTensors,
    get_sharded_grads,
    join_shards,
    make_full_weight,
    make_parallel_context,
    worst_relative_error,
)
from tests.helpers.upcasts import fp64_instead_of_fp32
from tests.helpers.whole import fill_shard, group_of_all_ranks, random_tensor

HIDDEN, LENGTH, BATCH = 16, 70, 2
SHARED: dict[str, Any] = {"hidden_size": HIDDEN, "mamba_num_heads": 8, "mamba_head_dim": 3, "mamba_state_dim": 5}


@dataclass(frozen=True)
class MixerCase:
    """A mixer of transformers, and our args for the same mixer.

    Args:
        name: model type, name of the mixer's class, name of the configuration's class.
        settings: arguments of the configuration's class.
        fields: fields of ``ModelArgs``.
    """

    name: tuple[str, str, str]
    settings: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)


BAMBA_SETTINGS = {
    "hidden_size": HIDDEN, "mamba_n_heads": 8, "mamba_d_head": 4, "mamba_d_state": 5, "mamba_expand": 2,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-3,
    "mamba_chunk_size": 16,
}  # fmt: skip
CASES = {
    "mamba2": MixerCase(
        ("mamba2", "Mamba2Mixer", "Mamba2Config"),
        {"hidden_size": HIDDEN, "num_heads": 8, "head_dim": 4, "state_size": 5, "n_groups": 2, "conv_kernel": 4,
         "chunk_size": 16, "num_hidden_layers": 1, "layer_norm_epsilon": 1e-3, "time_step_limit": (0.02, 0.9)},
        {"mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_dt_limit_min": 0.02, "mamba_dt_limit_max": 0.9},
    ),
    "mamba2, biases": MixerCase(
        ("mamba2", "Mamba2Mixer", "Mamba2Config"),
        {"hidden_size": HIDDEN, "num_heads": 8, "head_dim": 4, "state_size": 5, "n_groups": 1, "conv_kernel": 3,
         "chunk_size": 128, "num_hidden_layers": 1, "layer_norm_epsilon": 1e-3, "use_bias": True,
         "use_conv_bias": False},
        {"mamba_head_dim": 4, "mamba_num_groups": 1, "mamba_conv_kernel_dim": 3, "mamba_proj_bias": True,
         "mamba_conv_bias": False},
    ),
    "nemotron_h": MixerCase(
        ("nemotron_h", "NemotronHMamba2Mixer", "NemotronHConfig"),
        {"hidden_size": HIDDEN, "mamba_num_heads": 8, "mamba_head_dim": 3, "ssm_state_size": 5, "n_groups": 4,
         "conv_kernel": 4, "chunk_size": 16, "layer_norm_epsilon": 1e-3, "layers_block_type": ["linear_attention"]},
        {"mamba_num_groups": 4, "mamba_dt_limit_min": 0.001},
    ),
    "granitemoehybrid": MixerCase(
        ("granitemoehybrid", "GraniteMoeHybridMambaLayer", "GraniteMoeHybridConfig"),
        {**BAMBA_SETTINGS, "mamba_n_groups": 1, "mamba_proj_bias": True},
        {"mamba_head_dim": 4, "mamba_num_groups": 1, "mamba_proj_bias": True},
    ),
    "falcon_h1, norm": MixerCase(
        ("falcon_h1", "FalconH1Mixer", "FalconH1Config"),
        {**BAMBA_SETTINGS, "mamba_d_head": 3, "mamba_d_ssm": 24, "mamba_n_groups": 2, "mamba_rms_norm": True,
         "mamba_norm_before_gate": True, "ssm_in_multiplier": 1.2, "ssm_multipliers": [0.8, 1.1, 0.9, 1.4, 0.75]},
        {"mamba_num_groups": 2, "mamba_norm": "norm-first"},
    ),
    "falcon_h1": MixerCase(
        ("falcon_h1", "FalconH1Mixer", "FalconH1Config"),
        {**BAMBA_SETTINGS, "mamba_d_head": 3, "mamba_d_ssm": 24, "mamba_n_groups": 1, "mamba_rms_norm": False,
         "ssm_in_multiplier": 1.2, "ssm_multipliers": [0.8, 1.1, 0.9, 1.4, 0.75]},
        {"mamba_num_groups": 1, "mamba_norm": "none"},
    ),
}  # fmt: skip


def make_huggingface_mixer(case: MixerCase, dtype: torch.dtype) -> Any:
    """Return the mixer of transformers with random weights."""
    from importlib import import_module

    model_type, mixer_name, config_name = case.name
    modeling = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    configuration = import_module(f"transformers.models.{model_type}.configuration_{model_type}")
    torch.manual_seed(0)
    config = getattr(configuration, config_name)(**case.settings)
    mixer = getattr(modeling, mixer_name)(config, 0).to(dtype)
    if model_type == "falcon_h1":
        mixer.register_buffer("mup_vector", modeling.compute_mup_vector(config).to(dtype))
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn(parameter.shape).to(dtype) * 0.3)
    return mixer


def to_our_names(tensors: dict[str, torch.Tensor], mixer: Mamba2) -> dict[str, torch.Tensor]:
    """Return tensors of the mixer of transformers by our names, split into z, x, B, C and dt."""
    parts = mixer.parts
    rows = [parts.computed_rows(name) for name in ("z", "x", "B", "C", "dt")]
    ours = {name: tensors[name] for name in ("A_log", "D", "dt_bias")}
    ours["dense.weight"] = tensors["out_proj.weight"]
    if "norm.weight" in tensors:
        ours["norm.weight"] = tensors["norm.weight"]
    if "out_proj.bias" in tensors:
        ours["dense.bias"] = tensors["out_proj.bias"]
    for suffix, kind in (("", "weight"), ("_bias", "bias")):
        if f"in_proj.{kind}" in tensors:
            split = tensors[f"in_proj.{kind}"].split(rows)
            ours |= {
                f"projections.{name}{suffix}": t for name, t in zip(("z", "x", "B", "C", "dt"), split, strict=True)
            }
        if f"conv1d.{kind}" in tensors:
            split = tensors[f"conv1d.{kind}"].split(rows[1:4])
            ours |= {
                f"convolution.{name}{suffix}": t.squeeze(1) if kind == "weight" else t
                for name, t in zip(("x", "B", "C"), split, strict=True)
            }
    return ours


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_mixer_matches_transformers(name: str, dtype: torch.dtype, tolerance: float) -> None:
    case = CASES[name]
    with fp64_instead_of_fp32() if dtype == torch.float64 else nullcontext():
        hf_mixer = make_huggingface_mixer(case, dtype)
        x = random_tensor(1, BATCH, LENGTH, HIDDEN).to(dtype).requires_grad_()
        expected = hf_mixer(x)
        factor = random_tensor(2, *expected.shape).to(dtype)
        (expected * factor).sum().backward()
    multipliers = (
        {"branch_multipliers": FALCON_MULTIPLIERS.replace("mamba-output=0.65,", "")} if "falcon" in name else {}
    )
    args = mamba_model_args(**{**SHARED, "layernorm_epsilon": 1e-3, **case.fields, **multipliers})
    mixer = Mamba2(args, ParallelContext(), 0).to(dtype)
    mixer.load_state_dict(to_our_names({n: p.detach() for n, p in hf_mixer.named_parameters()}, mixer))
    our_x = x.detach().transpose(0, 1).requires_grad_()
    actual = mixer(our_x)
    (actual * factor.transpose(0, 1)).sum().backward()
    assert_close(actual.transpose(0, 1), expected, tolerance)
    assert_close(our_x.grad.transpose(0, 1), x.grad, tolerance)
    hf_grads = to_our_names({n: p.grad for n, p in hf_mixer.named_parameters()}, mixer)
    worst, worst_name = worst_relative_error({n: p.grad for n, p in mixer.named_parameters()}, hf_grads)
    assert worst <= tolerance, worst_name


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def make_mixer(group: Group | None = None, **overrides: Any) -> Mamba2:
    """Return our mixer in fp64 with known weights."""
    parallel = ParallelContext() if group is None else make_parallel_context(group)
    mixer = Mamba2(mamba_model_args(**overrides), parallel, 0).double()
    for name, parameter in mixer.named_parameters():
        fill_shard(parameter, make_full_weight(name, shard_of(parameter).global_shape))
    return mixer


@torch.no_grad()
def test_packed_documents_match_separate_documents() -> None:
    mixer, lengths = make_mixer(), [1, 2, 30, 64, 3, 70]
    x = random_tensor(3, sum(lengths), 1, HIDDEN)
    starts = document_starts(segment_ids_from_lengths(lengths, sum(lengths)).unsqueeze(0))
    separate = torch.cat([mixer(document) for document in x.split(lengths)])
    assert_close(mixer(x, starts=starts), separate, 1e-12)


# Tensor ranks.

TENSOR_CASES: dict[str, dict[str, Any]] = {
    "2 groups": {},
    "1 group": {"mamba_num_groups": 1, "mamba_proj_bias": True},
    "4 groups": {"mamba_num_groups": 4, "mamba_norm": "norm-first", "mamba_conv_bias": False},
    "2 groups, norm over 1": {"mamba_norm_groups": 1, "branch_multipliers": FALCON_MULTIPLIERS},
    "8 groups, no norm": {"mamba_num_groups": 8, "mamba_norm": "none", "recompute_attention": True},
}


def run_mixer(
    rank: int, size: int, is_sequence_parallel: bool
) -> dict[str, tuple[torch.Tensor, torch.Tensor, ShardedTensors]]:
    """Return case -> (output, gradient of the input, gradients of the weights) on this rank."""
    group, results = group_of_all_ranks(rank, size), {}
    for name, overrides in TENSOR_CASES.items():
        parallel = make_parallel_context(group)
        if is_sequence_parallel:
            parallel = ParallelContext(group, parallel.streams, sequence_parallel=True)
        mixer = Mamba2(mamba_model_args(**overrides), parallel, 0).double()
        for parameter_name, parameter in mixer.named_parameters():
            fill_shard(parameter, make_full_weight(parameter_name, shard_of(parameter).global_shape))
        x = random_tensor(4, 12, BATCH, HIDDEN)
        factor = random_tensor(5, 12, BATCH, HIDDEN)
        starts = document_starts(torch.tensor([[0] * 5 + [1] * 7, [0] * 12]))
        shard = slice(None) if not is_sequence_parallel else slice(12 // size * rank, 12 // size * (rank + 1))
        x = x[shard].requires_grad_()
        y = mixer(x, starts=starts)
        (y * factor[shard]).sum().backward()
        sum_group = SumGroup(group, is_partial)
        for parameter in mixer.parameters():
            sum_group.register(parameter)
        sum_group.sum(lambda parameter: parameter.grad)
        results[name] = y.detach(), x.grad, get_sharded_grads(mixer)
    return results


@pytest.mark.parametrize(
    ("size", "is_sequence_parallel"),
    [(2, False), (4, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, True), (4, False)))],
)
def test_tensor_ranks_match_one_process(size: int, is_sequence_parallel: bool) -> None:
    expected, ranks = run_mixer(0, 1, False), run_ranks(size, run_mixer, size, is_sequence_parallel)
    for name, (y, x_grad, grads) in expected.items():
        for idx, tensor in enumerate((y, x_grad)):
            parts = [rank[name][idx] for rank in ranks]
            if is_sequence_parallel:
                assert_close(torch.cat(parts), tensor, 1e-12)
            else:
                assert all((part - tensor).abs().max() <= 1e-12 * tensor.abs().max() for part in parts), name
        worst, worst_name = worst_relative_error(join_shards([rank[name][2] for rank in ranks]), join_shards([grads]))
        assert worst <= 1e-11, (name, worst_name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mamba_num_groups": 3, "mamba_num_heads": 12}, "--mamba-num-groups must be a multiple or a divisor of"),
        ({"mamba_num_groups": 3}, "--mamba-num-heads must be a multiple of --mamba-num-groups, got 8 and 3"),
        ({"mamba_num_heads": 6}, "--mamba-num-heads must be a multiple of --model-parallel-size, got 6 and 4"),
        (
            {"mamba_num_heads": 12, "mamba_num_groups": 4, "mamba_norm_groups": 3},
            "--mamba-norm-groups must be a multiple or a divisor of --model-parallel-size, got 3 and 4",
        ),
    ],
)
def test_uneven_groups_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mamba2(mamba_model_args(**fields), make_parallel_context(Group(tuple(range(4)), 1)), 0)


# Context ranks.


def run_context_rank(rank: int, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return this rank's tokens of the output and of the input's gradient, and the weights' gradients of all ranks."""
    context = group_of_all_ranks(rank, size)
    mixer = Mamba2(mamba_model_args(mamba_num_groups=1), ParallelContext(context=context), 0).double()
    for name, parameter in mixer.named_parameters():
        fill_shard(parameter, make_full_weight(name, parameter.shape))
    x, factor = (random_tensor(seed, length, BATCH, HIDDEN) for seed in (7, 8))
    starts = document_starts(torch.tensor([[0] * 3 + [1] * 8 + [2] * (length - 11), [5] * length]))
    x = split_along_context(x, context, 0).requires_grad_()
    y = mixer(x, starts=starts)
    (y * split_along_context(factor, context, 0)).sum().backward()
    return y.detach(), x.grad, {name: all_reduce(p.grad, context) for name, p in mixer.named_parameters()}


@pytest.mark.parametrize(
    ("size", "length"),
    [(2, 16), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 300), (4, 16), (4, 600)))],
)
def test_context_ranks_match_one_process(size: int, length: int) -> None:
    """One document is shorter than the convolution, and one spans all ranks. Chunks have 2 to 75 tokens."""
    *expected, expected_grads = run_context_rank(0, 1, length)
    ranks = run_ranks(size, run_context_rank, size, length)
    for idx, tensor in enumerate(expected):
        assert_close(to_sequence_order(torch.cat([rank[idx] for rank in ranks]), size), tensor, 1e-12)
    for rank in ranks:
        worst, name = worst_relative_error(rank[2], expected_grads)
        assert worst <= 1e-11, name


# Cache.


@torch.no_grad()
def test_cached_passes_match_full_pass() -> None:
    """Prompts of different lengths, padded at the end, then single tokens and two tokens at once."""
    mixer, prompts, num_new = make_mixer(), [5, 2, 9], 4
    full = [random_tensor(10 + row, length + num_new, 1, HIDDEN) for row, length in enumerate(prompts)]
    expected = [mixer(x) for x in full]
    slots = KVCacheSlots(32)
    cache = RecurrentCache(slots)
    padded = torch.zeros(max(prompts), len(prompts), HIDDEN, dtype=torch.float64)
    for row, length in enumerate(prompts):
        padded[:length, row] = full[row][:length, 0]
    padded[2:5, 1] = 7.0  # padding of a row must not matter
    slots.advance(torch.arange(max(prompts)).expand(len(prompts), -1), torch.tensor(prompts))
    y = mixer(padded, cache=cache)
    for row, length in enumerate(prompts):
        assert_close(y[:length, row], expected[row][:length, 0], 1e-12)
    done = 0
    for width in (1, 2, 1):
        positions = torch.tensor(prompts).unsqueeze(1) + done + torch.arange(width)
        slots.advance(positions)
        x = torch.cat([full[row][length + done : length + done + width] for row, length in enumerate(prompts)], dim=1)
        y = mixer(x, cache=cache)
        for row, length in enumerate(prompts):
            assert_close(y[:, row], expected[row][length + done : length + done + width, 0], 1e-12)
        done += width
    assert cache.state is not None and cache.conv is not None
    assert cache.state.shape == (3, 8, 3, 5) and cache.conv.shape == (3, 3, 8 * 3 + 2 * 2 * 5)


# Training.


def test_head_parameters_and_biases_have_no_weight_decay() -> None:
    mixer = Mamba2(mamba_model_args(mamba_proj_bias=True), ParallelContext(), 0)
    decayed, others = decay_groups(mixer.parameters(), 0.1)
    names = {id(parameter): name for name, parameter in mixer.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    assert {names[id(p)] for p in others["params"]} == {
        "A_log", "dt_bias", "D", "norm.weight", "dense.bias",
        *(f"projections.{name}_bias" for name in ("z", "x", "B", "C", "dt")),
        *(f"convolution.{name}_bias" for name in ("x", "B", "C")),
    }  # fmt: skip


def test_16_bit_weights_have_fp32_states() -> None:
    mixer = make_mixer().to(torch.bfloat16)
    cache = RecurrentCache(KVCacheSlots(8))
    x = random_tensor(6, 8, BATCH, HIDDEN).to(torch.bfloat16)
    y = mixer(x, cache=cache)
    assert y.dtype == torch.bfloat16 and cache.state is not None and cache.state.dtype == torch.float32
    with torch.no_grad():
        expected = mixer.double()(x.double())
    assert math.isfinite(y.float().sum().item()) and (y.double() - expected).abs().max() <= 0.05 * expected.abs().max()
