"""One training step of tiny megatron-core models, dumped for the referee with the pasted hook.

Each case is a configuration that Megatron-LM #7452 lists as silently wrong for several tensor ranks, or a correct one.
The step is that of a user's program: megatron-core's model, DDP wrapper, schedule, gradient reduction and optimizer.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.ssm import gated_delta_net
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from tests.helpers.megatron_core_on_cpu import fp64_for_fp32, init_model_parallel
from tools.referee_hook import CALLS, referee

VOCAB, SEQ, MICRO_BATCH, HIDDEN = 32, 16, 2, 32
LABEL_SMOOTHING = 0.2


@dataclass(frozen=True)
class Case:
    """A configuration: arguments of megatron-core's ``TransformerConfig`` and ``GPTModel``, and its loss.

    ``loss`` is "labels" (the model computes it), "smoothed" (vocabulary-parallel cross-entropy with label smoothing),
    or "auxiliary" (only the router's auxiliary loss). ``num_padded`` tokens at the end of each sample are padding.
    """

    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    loss: str = "labels"
    has_gdn: bool = False
    num_padded: int = 0


GDN = {
    "linear_key_head_dim": 4, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3, "deterministic_mode": True,
}  # fmt: skip
ROUTER = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.5, "calculate_per_token_loss": True,
    "moe_router_load_balancing_type": "aux_loss", "moe_token_dispatcher_type": "alltoall", "ffn_hidden_size": 16,
    "sequence_parallel": True,
}  # fmt: skip
CASES = {
    "correct": Case(),
    "sequence-parallel": Case({"sequence_parallel": True}),
    "label-smoothing": Case(loss="smoothed"),
    "gathered-logits": Case(model={"parallel_output": False}),
    "attention-sinks": Case({"softmax_type": "learnable"}),
    "gated-delta-net": Case(GDN, has_gdn=True),
    "router": Case(ROUTER, loss="auxiliary"),
    "router-padding": Case(ROUTER, loss="auxiliary", num_padded=5),
}  # fmt: skip


def main(rank: int, folder: Path, cases: list[str], tensor: int) -> None:
    """Run one step of each case in fp64 and dump it to ``{case}-tp{tensor}``.

    The run with one tensor rank also writes its weights, from which the others take their shards.
    """
    init_model_parallel(tensor_model_parallel_size=tensor)
    with fp64_for_fp32():
        for name in cases:
            step(CASES[name], folder / f"{name}-tp{tensor}", folder / f"{name}.pt", tensor)


def build_model(case: Case, tensor: int, weights_path: Path) -> DistributedDataParallel:
    """Return the model with the weights in ``weights_path``, which one tensor rank writes."""
    settings = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_layers": 2, "ffn_hidden_size": 48, **case.config}
    if tensor == 1:
        settings.pop("sequence_parallel", None)
    config = TransformerConfig(
        **settings, normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        tensor_model_parallel_size=tensor, finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip
    layers = get_gpt_layer_local_spec(config.num_moe_experts, normalization="RMSNorm")
    if case.has_gdn:
        layers.submodules.self_attention = gated_delta_net_spec()
    # The cross-entropy changes logits in place, which autograd rejects for a gather over one rank.
    options = case.model if tensor > 1 else {}
    model = GPTModel(
        config, layers, vocab_size=VOCAB, max_sequence_length=SEQ, position_embedding_type="rope", **options
    )
    if tensor == 1:
        torch.save({name: random_weight(name, p.shape) for name, p in model.named_parameters()}, weights_path)
    weights = torch.load(weights_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(shard(name, weights[name], parameter.shape, tensor))
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def gated_delta_net_spec() -> ModuleSpec:
    """Return megatron-core's GDN of local layers; its kernels come from a package for GPUs, its formula is used."""
    kernels = sys.modules[gated_delta_net.GatedDeltaNet.__init__.__module__]
    kernels.HAVE_FLA = True
    kernels.l2norm = lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    return ModuleSpec(
        module=gated_delta_net.GatedDeltaNet,
        submodules=gated_delta_net.GatedDeltaNetSubmodules(
            in_proj=tensor_parallel.ColumnParallelLinear,
            out_norm=WrappedTorchNorm,
            out_proj=tensor_parallel.RowParallelLinear,
        ),
    )


def random_weight(name: str, shape: torch.Size) -> torch.Tensor:
    """Return random values that depend only on the name; norms are near 1."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2
    return values + 1 if "norm" in name else values


def shard(name: str, weight: torch.Tensor, shape: torch.Size, tensor: int) -> torch.Tensor:
    """Return this tensor rank's shard; fused weights are sharded part by part."""
    qk, v, heads = (
        GDN["linear_key_head_dim"] * GDN["linear_num_key_heads"],
        GDN["linear_value_head_dim"] * GDN["linear_num_value_heads"],
        GDN["linear_num_value_heads"],
    )
    parts = {"linear_fc1": [len(weight) // 2] * 2, "in_proj": [qk, qk, v, v, heads, heads], "conv1d": [qk, qk, v]}
    rank = parallel_state.get_tensor_model_parallel_rank()
    for dim, size in enumerate(shape):
        if size != weight.shape[dim]:
            sizes = next((sizes for module, sizes in parts.items() if f".{module}." in name), [weight.shape[dim]])
            return torch.cat([part.chunk(tensor, dim)[rank] for part in weight.split(sizes, dim)], dim)
    return weight


def step(case: Case, dump: Path, weights_path: Path, tensor: int) -> None:
    """Run one training step and dump it."""
    model = build_model(case, tensor, weights_path)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0), [model])
    text = torch.randint(VOCAB, (MICRO_BATCH, SEQ + 1), generator=torch.Generator().manual_seed(7))
    model.zero_grad_buffer()
    optimizer.zero_grad()
    CALLS.clear()
    referee(dump, model, order=True)
    losses = get_forward_backward_func()(
        forward_step_func=partial(forward_step, case), data_iterator=iter([text]), model=[model], num_microbatches=1,
        seq_length=SEQ, micro_batch_size=MICRO_BATCH,
    )  # fmt: skip
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    referee(dump, model, loss=losses[0], tp=(tensor_rank, tensor))
    _, norm, _ = optimizer.step()
    referee(dump, norm=norm)


def forward_step(case: Case, batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """Return the losses of the tokens, and the function that averages them."""
    text = next(batches)
    tokens, labels = text[:, :-1], text[:, 1:].contiguous()
    positions = torch.arange(SEQ).expand_as(tokens)
    if case.loss == "smoothed":
        logits = model(tokens, positions, None).transpose(0, 1).contiguous()  # [s, b, v/t]
        losses = tensor_parallel.vocab_parallel_cross_entropy(logits, labels.T.contiguous(), LABEL_SMOOTHING)
        return losses, average
    if case.loss == "auxiliary":
        padding = (positions >= SEQ - case.num_padded) if case.num_padded else None
        losses = model(tokens, positions, None, labels=labels, padding_mask=padding) * 0
        return losses, partial(sum_over_tokens, MICRO_BATCH * (SEQ - case.num_padded))
    return model(tokens, positions, None, labels=labels), average


def average(losses: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the mean loss, and its value for the report."""
    return losses.mean(), losses.mean().item()


def sum_over_tokens(num_tokens: int, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the sum of the losses, the number of tokens, and the mean for the report."""
    return losses.sum(), torch.tensor(num_tokens, dtype=torch.int), losses.mean().item()
