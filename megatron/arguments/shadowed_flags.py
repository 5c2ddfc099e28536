"""Flags that have no effect because of the value of another flag.

Such a flag is accepted, because published scripts pass many of them in every run. It is listed in the start table with
the reason, and ``--strict-flags`` rejects it. Flags that contradict each other are errors instead
(``unused_flags``, the ``problems`` methods of the sections).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron import object_store
from megatron.config.config import Config
from megatron.config.decoder import has_window
from megatron.config.experts import AUX_LOSSES, FIELD_NAMES, NO_LOSS
from megatron.config.latent_attention import LATENT_ONLY
from megatron.config.layer_types import GATED_DELTA_NET, KIMI_DELTA, MAMBA2, MLP, layer_types, recurrent_mixers
from megatron.config.parallel import HIERARCHICAL
from megatron.config.recurrent import DELTA_MIXERS, LINEAR, MAMBA

FP8_FIELDS = ("fp8_recipe", "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


@dataclass(frozen=True)
class Shadow:
    """Fields that have no effect under a condition.

    Args:
        fields: names of the fields.
        is_shadowed: the condition.
        reason: text that completes "FLAG has no effect: ...".
    """

    fields: tuple[str, ...]
    is_shadowed: Callable[[Config], bool]
    reason: str


def _has_warmup_length(config: Config) -> bool:
    optimizer = config.optimizer
    return optimizer.lr_warmup_iters is not None or optimizer.lr_warmup_samples is not None


def _has_wsd_length(config: Config) -> bool:
    optimizer = config.optimizer
    return optimizer.lr_wsd_decay_iters is not None or optimizer.lr_wsd_decay_samples is not None


def _has_no_decay_length(config: Config) -> bool:
    """Check if the decay length has no effect: the style has no decay, and the warm-up does not depend on it."""
    is_endless = config.optimizer.lr_decay_style in ("constant", "inverse-square-root")
    return is_endless and (_has_warmup_length(config) or config.optimizer.warmup == 0)


def _layers_with_window(config: Config) -> int:
    """Count the layers with a window; 0 if ``--window-attn-skip-freq`` is malformed."""
    try:
        return sum(has_window(config.model, layer) for layer in range(config.model.num_layers))
    except ValueError:
        return 0


def _has_unused_window(config: Config) -> bool:
    return bool(config.model.window_size) and _layers_with_window(config) == 0


def _has_local_base_everywhere(config: Config) -> bool:
    has_base = bool(config.model.rotary_local_base)
    return has_base and _layers_with_window(config) == config.model.num_layers


def _has_no_dense_layer(config: Config) -> bool:
    model = config.model
    if not model.num_experts or "moe_ffn_hidden_size" not in config.explicit_fields:
        return False
    try:
        return all(layer_type.feed_forward != MLP for layer_type in layer_types(model))
    except ValueError:
        return False


def _reads_no_object_store(config: Config) -> bool:
    data = config.data
    paths = (*data.corpora.values(), data.sft, data.valid_sft)
    return not any(object_store.is_remote(word) for path in paths if path for word in path.split())


def _reads_bpe_files(config: Config) -> bool:
    data = config.data
    return data.tokenizer_type == "GPT2BPETokenizer" or (data.tokenizer_type is None and data.merge_file is not None)


def _reads_one_file(config: Config) -> bool:
    """Check if the tokenizer is read from one file: ``--tokenizer-path``, or ``--vocab-file`` without it."""
    return config.data.tokenizer_type != "NullTokenizer" and not _reads_bpe_files(config)


SHADOWS = (
    # learning rate
    Shadow(("warmup",), _has_warmup_length, "the warm-up has a length in steps, samples or tokens"),
    Shadow(
        ("lr_warmup_rounding",),
        lambda config: _has_warmup_length(config) or config.optimizer.lr_follows_samples,
        "the warm-up is not a fraction of steps",
    ),
    Shadow(
        ("lr_trained_tokens",),
        lambda config: not (config.batch.seq_length_curriculum and config.optimizer.lr_follows_samples),
        "it needs --seq-length-curriculum and a learning-rate schedule in samples",
    ),
    Shadow(("lr_warmup_init",), lambda config: config.optimizer.warmup_length == 0, "the learning rate has no warm-up"),
    Shadow(
        ("weight_decay",),
        lambda config: config.optimizer.weight_decay_incr_style != "constant",
        "the weight decay follows --start-weight-decay and --end-weight-decay",
    ),
    Shadow(
        ("wsd_decay_fraction",),
        lambda config: config.optimizer.lr_decay_style == "wsd" and _has_wsd_length(config),
        "the wsd decay has a length in steps or samples",
    ),
    Shadow(
        ("lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style"),
        lambda config: config.optimizer.lr_decay_style != "wsd",
        "--lr-decay-style is not wsd",
    ),
    Shadow(
        ("lr_decay_iters",),
        _has_no_decay_length,
        "--lr-decay-style has no decay length, and the warm-up does not depend on it",
    ),
    Shadow(
        ("lr_decay_samples",),
        lambda config: _has_no_decay_length(config) and not config.batch.has_growing_batch,
        "--lr-decay-style has no decay length, and the warm-up does not depend on it",
    ),
    Shadow(("min_lr",), lambda config: config.optimizer.lr_decay_style == "constant", "--lr-decay-style is constant"),
    # optimizer
    Shadow(
        ("exp_avg_dtype", "exp_avg_sq_dtype", "cpu_adam"),
        lambda config: not (config.optimizer.optimizer == "adamw" or config.optimizer.is_muon),
        "--optimizer is not AdamW",
    ),
    Shadow(
        ("apply_wd_to_qk_layernorm",),
        lambda config: config.model.qk_norm in ("none", "l2") or config.model.multi_latent_attention,
        "there are no norms of queries and keys with weights (--qk-norm)",
    ),
    # FP8
    Shadow(
        FP8_FIELDS,
        lambda config: config.precision.fp8_format is None,
        "no products are in FP8 (--fp8-format)",
    ),
    Shadow(
        FP8_FIELDS[2:],
        lambda config: config.precision.fp8_format is not None and not config.precision.first_last_layers_bf16,
        "all layers are in FP8 (--first-last-layers-bf16)",
    ),
    Shadow(
        ("allgather_bucket_size",),
        lambda config: config.optimizer.zero_stage not in (1, 2),
        "weights are gathered after an update with ZeRO 1 and 2 only",
    ),
    Shadow(
        ("stage3_prefetch_bucket_size",),
        lambda config: config.optimizer.zero_stage != 3,
        "weights are gathered layer by layer with ZeRO 3 only",
    ),
    Shadow(
        ("hierarchical_context_parallel_sizes",),
        lambda config: HIERARCHICAL not in config.parallel.cp_comm_type.split(),
        "no layer uses --cp-comm-type a2a+p2p",
    ),
    # experts
    Shadow(
        (*FIELD_NAMES[1:], "expert_model_parallel_size", "expert_tensor_parallel_size"),
        lambda config: not config.model.num_experts,
        "the model has no experts (--num-experts)",
    ),
    Shadow(
        ("moe_aux_loss_coeff",),
        lambda config: bool(config.model.num_experts) and config.model.moe_router_load_balancing_type == NO_LOSS,
        "--moe-router-load-balancing-type is none",
    ),
    Shadow(
        ("moe_router_load_balancing_type",),
        lambda config: (
            bool(config.model.num_experts)
            and set(config.model.balancing_types) <= set(AUX_LOSSES)
            and not config.model.has_aux_loss
        ),
        "--moe-aux-loss-coeff is 0",
    ),
    Shadow(
        ("moe_router_bias_update_rate",),
        lambda config: bool(config.model.num_experts) and not config.model.moe_router_enable_expert_bias,
        "there is no expert bias (--moe-router-enable-expert-bias)",
    ),
    Shadow(
        ("moe_token_drop_policy", "moe_eval_capacity_factor", "moe_min_capacity"),
        lambda config: bool(config.model.num_experts) and not config.model.moe_expert_capacity_factor,
        "experts drop no tokens (--moe-expert-capacity-factor)",
    ),
    Shadow(("ff_hidden_size",), _has_no_dense_layer, "all layers have experts of size --moe-ffn-hidden-size"),
    Shadow(
        ("mtp_loss_scaling_factor",),
        lambda config: not config.model.mtp_num_layers,
        "there are no multi-token prediction layers (--mtp-num-layers)",
    ),
    # attention
    Shadow(
        ("window_size", "rotary_local_base"),
        _has_unused_window,
        "--window-attn-skip-freq leaves all layers without a window",
    ),
    Shadow(
        (
            "rotary_base",
            "rotary_scaling",
            "rotary_scaling_factor",
            "rotary_low_frequency_factor",
            "rotary_high_frequency_factor",
            "rotary_original_positions",
            "rotary_beta_fast",
            "rotary_beta_slow",
            "rotary_attention_factor",
        ),
        _has_local_base_everywhere,
        "all layers have a window and use the frequencies of --rotary-local-base",
    ),  # fmt: skip
    Shadow(
        LATENT_ONLY[1:],
        lambda config: not config.model.multi_latent_attention,
        "there are no latents (--multi-latent-attention)",
    ),
    Shadow(
        ("mscale", "mscale_all_dim"),
        lambda config: config.model.multi_latent_attention and not config.model.has_yarn,
        "--rotary-scaling is not yarn",
    ),
    Shadow(
        ("kv_hidden_size",),
        lambda config: config.model.multi_latent_attention,
        "with --multi-latent-attention, queries and keys have --qk-head-dim + --qk-pos-emb-head-dim elements",
    ),
    Shadow(
        ("qk_norm",),
        lambda config: config.model.multi_latent_attention and config.model.qk_norm == "none",
        "with --multi-latent-attention, the latents always have norms",
    ),
    Shadow(
        ("qk_clip_threshold", "qk_clip_alpha"),
        lambda config: not config.model.qk_clip,
        "query and key weights are not clipped (--qk-clip)",
    ),
    Shadow(
        ("qk_clip_bound",),
        lambda config: not config.model.measures_logits,
        "attention logits are not measured (--qk-clip, --log-max-attention-logit)",
    ),
    # recurrent layers
    Shadow(
        LINEAR,
        lambda config: not recurrent_mixers(config.model) & DELTA_MIXERS,
        "no layer has the mixer gated_delta_net or kimi_delta",
    ),
    Shadow(
        ("linear_allow_neg_eigval",),
        lambda config: recurrent_mixers(config.model) & DELTA_MIXERS == {KIMI_DELTA},
        "only gated_delta_net has negative eigenvalues",
    ),
    Shadow(
        ("linear_full_rank_gates", "linear_decay_limit"),
        lambda config: recurrent_mixers(config.model) & DELTA_MIXERS == {GATED_DELTA_NET},
        "only kimi_delta has these gates",
    ),
    Shadow(MAMBA, lambda config: MAMBA2 not in recurrent_mixers(config.model), "no layer has the mixer mamba2"),
    # data
    Shadow(
        ("json_key", "max_bad_lines"),
        lambda config: not config.data.text_corpora,
        "no corpus of the run is text",
    ),
    Shadow(
        ("mid_level_dataset_surplus",),
        lambda config: not config.data.has_megatron_order,
        "only the order of --data-order megatron depends on it",
    ),
    Shadow(
        ("reset_position_ids", "reset_attention_mask"),
        lambda config: config.data.packing == "best-fit",
        "--packing best-fit keeps documents apart",
    ),
    Shadow(
        ("object_storage_cache_path", "object_storage_cache_gb"),
        _reads_no_object_store,
        "no data are read from an object store",
    ),
    Shadow(
        ("vocab_file",),
        lambda config: _reads_one_file(config) and config.data.tokenizer_path is not None,
        "the tokenizer is read from --tokenizer-path",
    ),
    Shadow(("merge_file",), _reads_one_file, "--tokenizer-type has no merges file"),
    Shadow(
        ("tokenizer_path",),
        lambda config: _reads_bpe_files(config) and config.data.vocab_file is not None,
        "the tokenizer is read from --vocab-file and --merge-file",
    ),
    # run
    Shadow(("eval_interval",), lambda config: config.batch.eval_iters == 0, "--eval-iters is 0"),
    Shadow(
        ("no_load_optim", "no_load_rng"),
        lambda config: config.checkpoint.finetune or config.checkpoint.eval_only,
        "--finetune and --eval-only (--skip-train) load the weights only",
    ),
    # proof
    Shadow(
        ("prove",), lambda config: bool(config.run.prove) and config.checkpoint.eval_only, "--eval-only takes no step"
    ),
)
"""The conditions that other modules do not report as errors, notes or ignored flags."""


def shadowed_fields(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (field, reason) for every given field that has no effect because of another field."""
    for shadow in SHADOWS:
        names = [name for name in shadow.fields if name in config.explicit_fields]
        if names and shadow.is_shadowed(config):
            for name in names:
                yield name, shadow.reason
