"""Trains tiny models with megatron-core: its layers, schedule, gradient reduction, optimizer and learning rates.

The loop has the order of a step of Megatron-LM's training program, which the package does not contain: zero the
gradients, forward and backward of all micro-batches, update, scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from tests.helpers.megatron_core_on_cpu import fp64_for_fp32, init_model_parallel
from tests.megatron_core.training_cases import (
    BETA_2,
    CASES,
    CLIP_GRAD,
    COMMON_CONFIG,
    EOD,
    GLOBAL_BATCH,
    LR,
    MICRO_BATCH,
    MIN_LR,
    NUM_MICRO_BATCHES,
    SEQ,
    STEPS,
    VOCAB,
    WARMUP_STEPS,
    WEIGHT_DECAY,
    TrainingCase,
)
from tests.megatron_core.weight_names import shard_of_rank

Tensors = dict[str, torch.Tensor]


def main(rank: int, folder: Path, cases: list[list[str]], tensor: int) -> None:
    """Train each (case, precision) and write the values of this rank to ``{case}-{precision}-{tensor}-{rank}.pt``.

    Reads the tokens [steps x global batch, s + 1] from ``tokens.pt`` and the full weights of a case, with
    megatron-core's names, from ``{case}.pt``.
    """
    init_model_parallel(tensor_model_parallel_size=tensor)
    tokens = torch.load(folder / "tokens.pt")
    for name, precision in cases:
        with fp64_for_fp32() if precision == "fp64" else nullcontext():
            values = train(CASES[name], tensor, torch.load(folder / f"{name}.pt"), tokens)
        torch.save(values, folder / f"{name}-{precision}-{tensor}-{rank}.pt")


def build_model(case: TrainingCase, tensor: int, weights: Tensors) -> DistributedDataParallel:
    """Return megatron-core's model of ``case`` with this rank's shards of ``weights``."""
    settings = {**COMMON_CONFIG, **case.config}
    if activation := settings.pop("activation", None):
        settings["activation_func"] = getattr(torch.nn.functional, activation)
    config = TransformerConfig(
        **settings,
        tensor_model_parallel_size=tensor,
        sequence_parallel=case.sequence_parallel and tensor > 1,
        use_cpu_initialization=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    layers = get_gpt_layer_local_spec(
        config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    model = GPTModel(config, layers, vocab_size=VOCAB, max_sequence_length=14, **case.model)
    assert sorted(weights) == sorted(name for name, _ in model.named_parameters())
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(shard_of_rank(name, weights[name], tensor_rank, tensor, is_gated=case.is_gated))
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def train(case: TrainingCase, tensor: int, weights: Tensors, tokens: torch.Tensor) -> dict[str, Any]:
    """Take all steps and return logits, gradients, norms, losses, learning rates and weights of this rank."""
    model = build_model(case, tensor, weights)
    optimizer_config = OptimizerConfig(
        optimizer="adam", lr=LR, min_lr=MIN_LR, weight_decay=WEIGHT_DECAY, adam_beta2=BETA_2, clip_grad=CLIP_GRAD
    )
    optimizer = get_megatron_optimizer(optimizer_config, [model])
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=LR, min_lr=MIN_LR, lr_warmup_steps=WARMUP_STEPS * GLOBAL_BATCH,
        lr_decay_steps=STEPS * GLOBAL_BATCH, lr_decay_style="cosine", start_wd=WEIGHT_DECAY, end_wd=WEIGHT_DECAY,
        wd_incr_steps=STEPS, wd_incr_style="constant",
    )  # fmt: skip
    scheduler.step(increment=GLOBAL_BATCH)  # our step n has the rate of Megatron's step n + 1
    with torch.no_grad():
        batch = make_batch(tokens[:MICRO_BATCH], case)
        values: dict[str, Any] = {"logits": model.eval()(*batch[:3])}  # [b, s, v/t]
    model.train()
    steps: list[tuple[list[tuple[float, int]], float, float]] = []
    for step in range(STEPS):
        rows = tokens[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        micro_batches = iter([make_batch(text, case) for text in rows.split(MICRO_BATCH)])
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=micro_batches, model=[model],
            num_microbatches=NUM_MICRO_BATCHES, seq_length=SEQ, micro_batch_size=MICRO_BATCH,
        )  # fmt: skip
        if step == 0:
            values["gradients"] = {name: p.main_grad.clone() for name, p in model.module.named_parameters()}
        rate = optimizer.param_groups[0]["lr"]
        is_updated, norm, _ = optimizer.step()
        assert is_updated
        scheduler.step(increment=GLOBAL_BATCH)
        steps.append((losses, norm, rate))
    values["losses"], values["norms"], values["rates"] = (list(column) for column in zip(*steps, strict=True))
    values["weights"] = {name: p.detach() for name, p in model.module.named_parameters()}
    return values


def make_batch(text: torch.Tensor, case: TrainingCase) -> tuple[torch.Tensor, ...]:
    """Return tokens, positions, attention mask, labels and loss mask of samples ``text`` [b, s + 1]."""
    masks = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    options = {name: name in case.masks for name in masks}
    fields = [
        _get_ltor_masks_and_position_ids(sample[:-1], EOD, create_attention_mask=True, **options) for sample in text
    ]
    attention_masks, loss_masks, positions = (torch.stack(column) for column in zip(*fields, strict=True))
    return text[:, :-1], positions, attention_masks, text[:, 1:].contiguous(), loss_masks


def forward_step(batches: Iterator[tuple[torch.Tensor, ...]], model: Any) -> tuple[torch.Tensor, Any]:
    """Return the losses of the tokens of a micro-batch, and the function that sums them."""
    tokens, positions, attention_mask, labels, loss_mask = next(batches)
    return model(tokens, positions, attention_mask, labels=labels), partial(sum_losses, loss_mask)


def sum_losses(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[float, int]]:
    """Return the sum of the losses of unmasked tokens, their number, and both as numbers for the report."""
    total, num_tokens = (losses * loss_mask).sum(), loss_mask.sum().to(torch.int)
    return total, num_tokens, (total.item(), int(num_tokens))
