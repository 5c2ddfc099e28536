"""Convert our settings to Megatron-LM's arguments in its checkpoints: the inverse of ``settings``. No torch."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint import former
from megatron.checkpoint.huggingface.config import saved_config
from megatron.config import Config
from megatron.config.optimizer import OptimizerConfig
from megatron.config.option import options_of
from megatron.errors import CheckpointError

_EXPERT_FIELDS = (
    "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
    "moe_expert_capacity_factor", "moe_token_drop_policy", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)  # fmt: skip
_NONE_IF_ZERO = (
    "moe_router_num_groups", "moe_router_group_topk", "moe_z_loss_coeff", "moe_expert_capacity_factor",
    "moe_shared_expert_intermediate_size",
)  # fmt: skip
"""Settings that Megatron-LM switches off by None."""
_DECAY_STYLES = {"wsd": "WSD"}


@dataclass(frozen=True)
class SavedRun:
    """Configuration, counters, and run settings in a checkpoint of ours.

    Args:
        progress: the metadata's entry ``progress``.
        optimizer: optimizer and learning-rate schedule settings.
        batch, precision, run: these sections' settings, by name.
    """

    config: Config
    progress: Mapping[str, int]
    optimizer: OptimizerConfig
    batch: Mapping[str, Any]
    precision: Mapping[str, Any]
    run: Mapping[str, Any]
    num_replicas: int

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> SavedRun:
        """Restore the run from its checkpoint metadata.

        Raises:
            CheckpointError: the metadata has no configuration.
        """
        config, sections = saved_config(metadata), former.convert_settings(metadata["config"])
        names = {option.name for option in options_of(OptimizerConfig)}
        section = {name: value for name, value in sections.get("optimizer", {}).items() if name in names}
        return cls(
            config,
            {"updates": 0, "samples_consumed": 0, "samples_skipped": 0, "step": 0, **metadata["progress"]},
            OptimizerConfig(**section),
            sections.get("batch", {}),
            sections.get("precision", {}),
            sections.get("run", {}),
            int(metadata.get("layout", {}).get("data", 1)),
        )

    @property
    def global_batch_size(self) -> int:
        """Samples per step."""
        explicit = self.batch.get("requested_global_batch_size")
        return int(explicit or self.batch.get("batch_size", 1) * self.batch.get("gas", 1) * self.num_replicas)

    @property
    def dtype(self) -> str:
        """Weight type in training: fp32, bf16 or fp16."""
        return str(self.precision.get("dtype") or "fp32")

    def in_samples(self, length: float) -> float:
        """Convert a length of the learning-rate schedule to samples, the unit of Megatron-LM's scheduler."""
        samples = length if self.optimizer.lr_follows_samples else length * self.global_batch_size
        return int(samples) if samples == int(samples) else samples


def scheduler_state(run: SavedRun) -> dict[str, Any]:
    """Build the state of Megatron-LM's ``OptimizerParamScheduler``.

    Source: Megatron-LM, core/optimizer_param_scheduler.py, ``state_dict``; training.py, lengths in samples.
    """
    settings, progress = run.optimizer, run.progress
    updated = progress["samples_consumed"] - progress["samples_skipped"]
    if settings.lr_trained_tokens != "none":
        dropped = progress.get("tokens_dropped", 0) - progress.get("tokens_dropped_skipped", 0)
        updated -= dropped // int(run.batch["seq_length"])
    decay = run.in_samples(settings.lr_decay_samples or settings.lr_decay_iters or 1)
    train_iters = int(run.batch.get("train_iters") or 0)
    return {
        "max_lr": settings.lr,
        "lr_warmup_steps": run.in_samples(settings.warmup_length),
        "num_steps": updated if settings.lr_follows_samples else progress["updates"] * run.global_batch_size,
        "lr_decay_style": _DECAY_STYLES.get(settings.lr_decay_style, settings.lr_decay_style),
        "lr_decay_steps": decay,
        "min_lr": settings.min_lr,
        "start_wd": settings.weight_decay if settings.start_weight_decay is None else settings.start_weight_decay,
        "end_wd": settings.weight_decay if settings.end_weight_decay is None else settings.end_weight_decay,
        "wd_incr_style": settings.weight_decay_incr_style,
        "wd_incr_steps": int(run.batch.get("train_samples") or train_iters * run.global_batch_size),
    }


def arguments_of(run: SavedRun, *, uses_distributed_optimizer: bool, has_optimizer: bool) -> dict[str, Any]:
    """Build Megatron-LM's arguments for a run, by name.

    Args:
        uses_distributed_optimizer, has_optimizer: the exported optimizer state's form.
    """
    settings, progress, dtype, schedule = run.optimizer, run.progress, run.dtype, scheduler_state(run)
    lengths: dict[str, Any] = {}
    if settings.lr_follows_samples:
        lengths = {
            "train_samples": run.batch.get("train_samples"), "lr_decay_samples": settings.lr_decay_samples,
            "lr_warmup_samples": settings.warmup_length, "lr_warmup_iters": 0, "lr_decay_iters": None,
            "lr_wsd_decay_samples": settings.lr_wsd_decay_samples,
        }  # fmt: skip
    else:
        lengths = {
            "train_samples": None, "lr_decay_iters": settings.lr_decay_iters or None, "lr_warmup_samples": 0,
            "lr_warmup_iters": settings.warmup_length, "lr_decay_samples": None,
            "lr_wsd_decay_iters": settings.lr_wsd_decay_iters,
        }  # fmt: skip
    return {
        **_model_arguments(run.config),
        "seq_length": int(run.batch.get("seq_length") or 0), "iteration": progress["step"],
        "micro_batch_size": int(run.batch.get("batch_size") or 1), "global_batch_size": run.global_batch_size,
        "consumed_train_samples": progress["samples_consumed"], "consumed_valid_samples": 0,
        "skipped_train_samples": 0, "train_iters": int(run.batch.get("train_iters") or 0), **lengths,
        "lr": settings.lr, "min_lr": settings.min_lr, "lr_warmup_init": settings.lr_warmup_init,
        "lr_warmup_fraction": None,
        "lr_decay_style": _DECAY_STYLES.get(settings.lr_decay_style, settings.lr_decay_style),
        "lr_wsd_decay_style": settings.lr_wsd_decay_style, "weight_decay": settings.weight_decay,
        "start_weight_decay": schedule["start_wd"], "end_weight_decay": schedule["end_wd"],
        "weight_decay_incr_style": settings.weight_decay_incr_style, "optimizer": "adam",
        "adam_beta1": settings.adam_beta1,
        "adam_beta2": settings.adam_beta2, "adam_eps": settings.adam_eps, "clip_grad": settings.clip_grad,
        "bf16": dtype == "bf16", "fp16": dtype == "fp16", "seed": run.run.get("seed", 1234),
        "calculate_per_token_loss": run.config.model.loss_average == "token",
        "use_distributed_optimizer": uses_distributed_optimizer, "no_save_optim": not has_optimizer,
        "no_save_rng": True, "ckpt_format": "torch_dist", "use_dist_ckpt": True,
        "dist_ckpt_optim_fully_reshardable": uses_distributed_optimizer, "ckpt_fully_parallel_save": True,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
        "expert_model_parallel_size": 1, "data_parallel_size": 1, "world_size": 1,
        "virtual_pipeline_model_parallel_size": None,
    }  # fmt: skip


def _model_arguments(config: Config) -> dict[str, Any]:
    model = config.model
    num_groups = model.num_query_groups or model.num_attention_heads
    arguments: dict[str, Any] = {
        "num_layers": model.num_layers, "hidden_size": model.hidden_size, "ffn_hidden_size": model.ff_hidden_size,
        "num_attention_heads": model.num_attention_heads, "kv_channels": model.kv_hidden_size,
        "group_query_attention": num_groups != model.num_attention_heads, "num_query_groups": num_groups,
        "max_position_embeddings": model.max_position_embeddings,
        "position_embedding_type": model.position_embedding_type, "use_rotary_position_embeddings": False,
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
        "rotary_base": model.rotary_base, "rotary_percent": model.rotary_percent,
        "rotary_interleaved": model.rotary_interleaved, "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": model.rotary_scaling == "llama3", "rope_scaling_factor": model.rotary_scaling_factor,
        "normalization": model.normalization, "norm_epsilon": model.layernorm_epsilon,
        "apply_layernorm_1p": model.layernorm_1p, "add_bias_linear": model.hidden_bias,
        "add_qkv_bias": model.add_qkv_bias, "qk_layernorm": model.qk_norm == "head",
        "qk_l2_norm": model.qk_norm == "l2",
        "activation_func_clamp_value": model.activation_func_clamp_value or None,
        "glu_linear_offset": model.glu_linear_offset,
        "swiglu": model.activation == "gated-silu", "squared_relu": model.activation == "squared-relu",
        "bias_gelu_fusion": model.activation == "gelu-tanh", "openai_gelu": False, "quick_geglu": False,
        "untie_embeddings_and_output_weights": model.untie_embeddings, "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout, "softmax_scale": getattr(model, "softmax_scale", None) or None,
        "apply_residual_connection_post_layernorm": model.apply_residual_connection_post_layernorm,
        "window_size": (model.window_size, 0) if model.window_size else None,
        "window_attn_skip_freq": _pattern(model.window_attn_skip_freq) if model.window_attn_skip_freq else None,
        "padded_vocab_size": model.vocab_size, "vocab_size": model.vocab_size, "make_vocab_size_divisible_by": 1,
        "tokenizer_type": config.data.tokenizer_type, "num_experts": None, "mtp_num_layers": None,
        "multi_latent_attention": False, "qk_clip": model.qk_clip, "qk_clip_alpha": model.qk_clip_alpha,
        "qk_clip_threshold": model.qk_clip_threshold, "log_max_attention_logit": model.log_max_attention_logit,
    }  # fmt: skip
    if model.rotary_scaling == "linear":
        arguments["rotary_seq_len_interpolation_factor"] = model.rotary_scaling_factor
    if model.num_experts > 1:
        arguments |= {"num_experts": model.num_experts, "moe_grouped_gemm": True}
        arguments |= {name: getattr(model, name) for name in _EXPERT_FIELDS}
        arguments |= {name: None for name in _NONE_IF_ZERO if not arguments[name]}
        if len(model.balancing_types) > 1:
            arguments["moe_router_load_balancing_type"] = list(model.balancing_types)
            arguments["moe_aux_loss_coeff"] = list(model.aux_loss_coeffs)
        arguments["moe_layer_freq"] = _pattern(model.moe_layer_freq)
    return arguments


def _pattern(text: str) -> Any:
    """Parse a per-layer setting as a number or a list.

    Raises:
        CheckpointError: ``text`` is neither.
    """
    factors = text.replace(" ", "")
    try:
        return ast.literal_eval(factors)
    except (ValueError, SyntaxError) as error:
        raise CheckpointError(f"{text!r} must be a number or a list such as [0,1,1] for an export") from error


def check_gelu(config: Config) -> None:
    """Check that Megatron-Core supports the activation. It computes GELU's tanh form only in layers with biases.

    Raises:
        CheckpointError: the activation is GELU's tanh form, and the layers have no biases.
    """
    if config.model.activation == "gelu-tanh" and not config.model.hidden_bias:
        raise CheckpointError(
            "--activation gelu-tanh without --hidden-bias cannot be exported: Megatron-Core computes the tanh form of "
            "GELU only together with a bias"
        )
