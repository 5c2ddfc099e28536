"""Trains a GPT of megatron-core, saves and loads ``torch_dist`` checkpoints in the folder format of Megatron-LM.

The package has neither a training loop nor the outer folder format of Megatron-LM. Both are written here, after
megatron/training/training.py and checkpointing.py: the keys of the state, the arguments, the scheduler in samples.
"""

from __future__ import annotations

import argparse
import json
import queue
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

from tests.helpers.megatron_core_on_cpu import init_model_parallel


def main(rank: int, folder: Path, jobs: list[dict[str, Any]]) -> None:
    """Run the ``jobs`` one after another; see ``_run`` for their keys."""
    torch.set_num_threads(1)
    filesystem_async._results_queue = queue.Queue()  # saves are synchronous; by default a server process has the queue
    moe_utils.te_general_gemm = None  # the router of 0.16.1 reads this name, which exists only with Transformer Engine
    for job in jobs:
        _run(rank, folder, **job)
        parallel_state.destroy_model_parallel()


def _run(
    rank: int, folder: Path, name: str, args: dict[str, Any], last: int, load: str = "", save: str = "",
    save_at: int = -1,
) -> None:  # fmt: skip
    """Train up to step ``last`` on ``tokens.npy``; write NAME.json: step -> [loss, learning rate, gradient norm].

    Args:
        args: arguments of Megatron-LM, as its checkpoints store them, completed by ``ARGS``.
        load, save: names of folders in ``folder``; "" for none.
        save_at: step after which to save.
    """
    options = argparse.Namespace(**{**ARGS, **args, "world_size": dist.get_world_size()})
    init_model_parallel(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        expert_model_parallel_size=options.expert_model_parallel_size,
    )
    options.data_parallel_size = parallel_state.get_data_parallel_world_size()
    torch.manual_seed(options.seed)
    trainer = _Trainer(options)
    if load:
        trainer.load(folder / load)
    tokens = torch.from_numpy(np.load(folder / "tokens.npy"))
    losses = {}
    for step in range(options.iteration, last):
        losses[step + 1] = trainer.step(tokens)
        if step + 1 == save_at:
            trainer.save(folder / save)
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(losses))


ARGS: dict[str, Any] = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1,
    "data_parallel_size": 1, "context_parallel_size": 1, "world_size": 1, "num_experts": None,
    "group_query_attention": False, "num_query_groups": None, "kv_channels": None, "swiglu": False,
    "normalization": "LayerNorm", "norm_epsilon": 1e-5, "add_bias_linear": True, "add_qkv_bias": False,
    "bias_gelu_fusion": False, "position_embedding_type": "learned_absolute", "rotary_base": 10000,
    "rotary_percent": 1.0, "untie_embeddings_and_output_weights": False, "qk_layernorm": False,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "params_dtype": torch.float32, "bf16": False, "fp16": False,
    "optimizer": "adam", "lr": 1e-2, "min_lr": 1e-3, "lr_decay_style": "cosine", "lr_warmup_iters": 4,
    "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "clip_grad": 1.0,
    "use_distributed_optimizer": False, "seed": 1234, "iteration": 0, "consumed_train_samples": 0,
    "skipped_train_samples": 0, "consumed_valid_samples": 0, "ckpt_format": "torch_dist", "no_save_optim": False,
    "no_save_rng": True, "non_homogeneous_layers": False, "distrib_optim_sharding_type": "fully_reshardable",
}  # fmt: skip


class _Trainer:
    """Model, optimizer and scheduler of one rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.dp_cp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        config = _transformer_config(args)
        spec = get_gpt_layer_local_spec(
            num_experts=args.num_experts, moe_grouped_gemm=False, qk_layernorm=args.qk_layernorm,
            normalization=args.normalization,
        )  # fmt: skip
        module = GPTModel(
            config, spec, vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings,
            parallel_output=True, position_embedding_type=args.position_embedding_type,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            rotary_percent=args.rotary_percent, rotary_base=args.rotary_base,
        )  # fmt: skip
        module = module.to(args.params_dtype)
        _initialize(module)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False,
            use_distributed_optimizer=args.use_distributed_optimizer,
        )  # fmt: skip
        self.model = DistributedDataParallel(config, ddp_config, module)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=args.lr, min_lr=args.min_lr, weight_decay=args.weight_decay,
                adam_beta1=args.adam_beta1, adam_beta2=args.adam_beta2, adam_eps=args.adam_eps,
                clip_grad=args.clip_grad, bf16=args.bf16, params_dtype=args.params_dtype,
                use_distributed_optimizer=args.use_distributed_optimizer,
            ),
            [self.model],
        )  # fmt: skip
        batch = args.global_batch_size
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=args.lr, min_lr=args.min_lr,
            lr_warmup_steps=args.lr_warmup_iters * batch, lr_decay_steps=args.train_iters * batch,
            lr_decay_style=args.lr_decay_style, start_wd=args.weight_decay, end_wd=args.weight_decay,
            wd_incr_steps=args.train_iters * batch, wd_incr_style="constant",
        )  # fmt: skip

    def step(self, tokens: torch.Tensor) -> list[float]:
        """Take one step on the next samples; return loss, learning rate and gradient norm."""
        args, batch = self.args, self.args.global_batch_size
        rank, replicas = parallel_state.get_data_parallel_rank(), args.data_parallel_size
        samples = tokens[args.consumed_train_samples : args.consumed_train_samples + batch].chunk(replicas)[rank]
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._loss(samples[:, :-1], samples[:, 1:])
        loss.backward()
        finalize_model_grads([self.model])
        learning_rate = self.optimizer.param_groups[0]["lr"]
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=batch)
        args.iteration += 1
        args.consumed_train_samples += batch
        total = loss.detach().clone()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return [total.item() / replicas, learning_rate, float(grad_norm)]

    def _loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        return self.model(tokens, positions, mask, labels=labels).float().mean()  # losses [b, s]

    def _state(self, *, is_loading: bool) -> dict[str, Any]:
        args = self.args
        metadata = {
            "singleton_local_shards": False, "chained_optim_avoid_prefix": True, "dp_cp_group": self.dp_cp_group,
        }  # fmt: skip
        if args.use_distributed_optimizer:
            metadata["distrib_optim_sharding_type"] = args.distrib_optim_sharding_type
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = True
        if args.non_homogeneous_layers:
            metadata["non_homogeneous_layers"] = True
        state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": args.iteration}
        state["model"] = self.model.module.sharded_state_dict(metadata=metadata)
        state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        state["opt_param_scheduler"] = self.scheduler.state_dict()
        state["num_floating_point_operations_so_far"] = 0
        return state

    def save(self, root: Path) -> None:
        """Save into ``root``/iter_N. Collective."""
        folder = root / f"iter_{self.args.iteration:07d}"
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        dist_checkpointing.save(self._state(is_loading=False), str(folder), content_metadata=metadata)
        if dist.get_rank() == 0:
            (root / "latest_checkpointed_iteration.txt").write_text(str(self.args.iteration))

    def load(self, root: Path) -> None:
        """Load the newest checkpoint of ``root``. Collective."""
        if self.args.use_distributed_optimizer:  # with torch's AdamW, it can be loaded only after a step
            self.optimizer.chained_optimizers[0]._init_optimizer_states_with_dummy_values()
            DistributedOptimizer._set_main_param_and_optimizer_states = _set_states_except_steps
        iteration = int((root / "latest_checkpointed_iteration.txt").read_text())
        state = dist_checkpointing.load(self._state(is_loading=True), str(root / f"iter_{iteration:07d}"))
        saved = state["args"]
        for name in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"):
            assert getattr(saved, name) == getattr(self.args, name), name
        self.model.module.load_state_dict(state["model"], strict=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["opt_param_scheduler"])
        self.args.iteration = state["iteration"]
        self.args.consumed_train_samples = saved.consumed_train_samples


_set_states = DistributedOptimizer._set_main_param_and_optimizer_states


def _set_states_except_steps(self: DistributedOptimizer, param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
    """Set main param and moments; keep the step.

    torch's AdamW has a step for each parameter, for which 0.16.1 is not prepared: it asks for it in the checkpoint, and
    it sets one tensor as the step of all parameters, which each of them would increment.
    """
    group_idx, param_idx = self.model_param_group_index_map[param]
    state = self.optimizer.state[self.optimizer.param_groups[group_idx]["params"][param_idx]]
    state["step"] = state["step"].clone()
    _set_states(self, param, {**tensors, "step": state["step"]})


def _transformer_config(args: argparse.Namespace) -> TransformerConfig:
    experts = {}
    if args.num_experts:
        experts = {
            "num_moe_experts": args.num_experts, "moe_router_topk": args.moe_router_topk,
            "moe_ffn_hidden_size": args.moe_ffn_hidden_size, "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather", "moe_layer_freq": args.moe_layer_freq,
            "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
        }  # fmt: skip
    return TransformerConfig(
        num_layers=args.num_layers, hidden_size=args.hidden_size, ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads, num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels, normalization=args.normalization, layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu, activation_func=F.silu if args.swiglu else F.gelu, bias_activation_fusion=False,
        bias_dropout_fusion=False, add_bias_linear=args.add_bias_linear, add_qkv_bias=args.add_qkv_bias,
        attention_dropout=0.0, hidden_dropout=0.0, params_dtype=args.params_dtype, pipeline_dtype=args.params_dtype,
        bf16=args.bf16, qk_layernorm=args.qk_layernorm, use_cpu_initialization=True,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False, **experts,
    )  # fmt: skip


def _initialize(module: torch.nn.Module) -> None:
    """Draw biases and norms, which would be zeros and ones, so that exchanged tensors cannot go unnoticed."""
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
