"""A flag without effect because of another flag is reported, and ``--strict-flags`` rejects it."""

from __future__ import annotations

import functools
import itertools
import re

import pytest

from megatron.arguments import parse
from megatron.arguments.flag_values import all_options
from megatron.arguments.shadowed_flags import SHADOWS
from megatron.config import Config, OptimizerConfig
from megatron.config.option import options_of
from megatron.errors import ConfigError
from megatron.training.optimizer_setup import make_lr_scheduler
from tests.helpers.rows import check_rows

SCHEDULE_VALUES = {
    "min_lr": ("1e-5", "2e-5"),
    "lr_warmup_init": ("1e-5", "2e-5"),
    "lr_decay_iters": ("290", "299"),
    "warmup": ("0.21", "0.31"),
    "lr_warmup_rounding": ("none", "down"),
    "lr_decay_samples": ("1300", "1700"),
    "lr_warmup_iters": ("3", "7"),
    "lr_warmup_samples": ("10", "22"),
    "lr_wsd_decay_iters": ("5", "9"),
    "lr_wsd_decay_samples": ("21", "33"),
    "lr_wsd_decay_style": ("cosine", "exponential"),
    "wsd_decay_fraction": ("0.3", "0.4"),
}
"""Fields of the schedule, two values each."""
SAMPLED_UPDATES = (*range(12), *range(26, 41), *range(288, 301), *range(316, 326), *range(416, 426), 10**7)
"""Updates of the warm-up, of the end of the decay, and far beyond it."""
GROUP_FIELDS = {"lr_embedding", "lr_head", "lr_by_name", "lr", "lr_decay_style", "lr_step_offset", "lr_trained_tokens"}

ROPE_FLAGS = "--position-embedding-type rope"
EXPERT_FLAGS = "--num-experts 4"
KIMI_FLAGS = "--experimental-attention-variant kimi_delta --linear-num-value-heads 16"
SHADOWED = {
    # model
    "ff_hidden_size": f"{EXPERT_FLAGS} --moe-ffn-hidden-size 8 --ff-hidden-size 32",
    "layout_independent_dropout": "--layout-independent-dropout --attention-dropout 0 --hidden-dropout 0",
    **{
        name: f"--{name.replace('_', '-')} {value}".strip()
        for name, value in {
            "moe_ffn_hidden_size": "8",
            "moe_layer_freq": "2",
            "moe_router_topk": "1",
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": "",
            "moe_router_topk_scaling_factor": "2",
            "moe_router_num_groups": "2",
            "moe_router_group_topk": "1",
            "moe_router_enable_expert_bias": "",
            "moe_z_loss_coeff": "0.1",
            "moe_expert_capacity_factor": "1",
            "moe_shared_expert_intermediate_size": "8",
            "moe_shared_expert_gate": "",
            "moe_use_residual": "",
            "expert_model_parallel_size": "1",
            "expert_tensor_parallel_size": "1",
        }.items()
    },
    **{
        name: f"--{name.replace('_', '-')} {value}"
        for name, value in {
            "q_lora_rank": "8",
            "kv_lora_rank": "8",
            "qk_head_dim": "8",
            "qk_pos_emb_head_dim": "8",
            "latent_norm_epsilon": "1e-6",
            "moe_router_group_score_topk": "1",
        }.items()
    },
    **{
        name: f"--{name.replace('_', '-')} {value}".strip()
        for name, value in {
            "linear_attention_freq": "2",
            "linear_conv_kernel_dim": "3",
            "linear_key_head_dim": "8",
            "linear_value_head_dim": "8",
            "linear_num_key_heads": "2",
            "linear_num_value_heads": "4",
            "linear_norm_epsilon": "1e-6",
            "linear_norm_placement": "after",
            "mamba_state_dim": "8",
            "mamba_head_dim": "8",
            "mamba_num_groups": "2",
            "mamba_num_heads": "4",
            "mamba_conv_kernel_dim": "3",
            "mamba_proj_bias": "",
            "mamba_norm": "none",
            "mamba_norm_groups": "2",
            "mamba_dt_limit_min": "0.1",
            "mamba_dt_limit_max": "0.2",
        }.items()
    },
    "mamba_conv_bias": "--no-mamba-conv-bias",
    "experimental_attention_variant": "--experimental-attention-variant gdn --linear-attention-freq [0,0,0,0]",
    "linear_allow_neg_eigval": f"{KIMI_FLAGS} --linear-allow-neg-eigval",
    "linear_full_rank_gates": "--experimental-attention-variant gdn --linear-full-rank-gates",
    "linear_decay_limit": "--experimental-attention-variant gdn --linear-decay-limit 5",
    "mscale": f"{ROPE_FLAGS} --multi-latent-attention --mscale 0.7",
    "mscale_all_dim": f"{ROPE_FLAGS} --multi-latent-attention --mscale-all-dim 0.7",
    "kv_hidden_size": f"{ROPE_FLAGS} --multi-latent-attention --kv-channels 128",
    "qk_norm": f"{ROPE_FLAGS} --multi-latent-attention --qk-layernorm",
    "moe_router_bias_update_rate": f"{EXPERT_FLAGS} --moe-router-bias-update-rate 0.1",
    "moe_router_load_balancing_type": f"{EXPERT_FLAGS} --moe-router-load-balancing-type aux_loss",
    "moe_aux_loss_coeff": f"{EXPERT_FLAGS} --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
    "moe_eval_capacity_factor": f"{EXPERT_FLAGS} --moe-eval-capacity-factor 2",
    "moe_min_capacity": f"{EXPERT_FLAGS} --moe-min-capacity 4",
    "moe_token_drop_policy": f"{EXPERT_FLAGS} --moe-token-drop-policy position",
    "mtp_loss_scaling_factor": "--mtp-loss-scaling-factor 0.3",
    "qk_clip_threshold": "--qk-clip-threshold 50 --log-max-attention-logit",
    "qk_clip_alpha": "--qk-clip-alpha 0.3",
    "qk_clip_bound": "--qk-clip-bound",
    "rotary_base": "--rotary-base 500",
    "rotary_scaling": f"{ROPE_FLAGS} --rotary-scaling yarn --window-size 4 --rotary-local-base 100",
    "rotary_scaling_factor": f"{ROPE_FLAGS} --rotary-scaling-factor 4",
    "rotary_low_frequency_factor": f"{ROPE_FLAGS} --rotary-scaling yarn --rotary-low-frequency-factor 2",
    "rotary_high_frequency_factor": f"{ROPE_FLAGS} --rotary-scaling yarn --rotary-high-frequency-factor 2",
    "rotary_original_positions": f"{ROPE_FLAGS} --rotary-scaling linear --rotary-original-positions 9",
    "rotary_beta_fast": f"{ROPE_FLAGS} --rotary-scaling llama3 --rotary-beta-fast 9",
    "rotary_beta_slow": f"{ROPE_FLAGS} --rotary-scaling llama3 --rotary-beta-slow 2",
    "rotary_short_factors": f"{ROPE_FLAGS} --rotary-scaling yarn --rotary-short-factors [2.0]",
    "rotary_long_factors": f"{ROPE_FLAGS} --rotary-scaling yarn --rotary-long-factors [2.0]",
    "attention_temperature_floor": f"{ROPE_FLAGS} --attention-temperature-floor 8",
    "rotary_attention_factor": f"{ROPE_FLAGS} --rotary-scaling llama3 --rotary-attention-factor 2",
    "rotary_percent": "--rotary-percent 0.5",
    "no_rope_freq": "--no-rope-freq 2",
    "sink_layers": "--sink-layers window --softmax-type learnable",
    "window_num_query_groups": "--window-num-query-groups 4",
    "rotary_interleaved": "--rotary-interleaved",
    "rotary_truncate": "--no-rotary-truncate",
    "qk_norm_order": "--qk-norm-order after",
    "apply_wd_to_qk_layernorm": "--apply-wd-to-qk-layernorm",
    "activation_func_clamp_value": "--activation-func-clamp-value 7",
    "glu_linear_offset": "--glu-linear-offset 1",
    "rotary_local_base": f"{ROPE_FLAGS} --rotary-local-base 100 --window-size 4 --window-attn-skip-freq [0,0,0,0]",
    "alibi_bias_max": "--alibi-bias-max 4",
    "norm_bias": "--no-norm-bias --normalization RMSNorm",
    "window_size": "--window-size 4 --window-attn-skip-freq 1",
    "window_attn_skip_freq": "--window-attn-skip-freq 2",
    "add_qkv_bias": "--add-qkv-bias --hidden-bias",
    "dim_model_base": "--dim-model-base 8 --mup-base-hidden-size 16",
    "mup_base_head_dim": "--mup-base-head-dim 8 --softmax-scale 3",
    "num_layers": "t5: --num-layers 3 --enc-layers 1 --dec-layers 2",
    "max_position_embeddings": "t5: --max-position-embeddings 512",
    # families
    "noise_density": "t5: --noise-density 0.3 --denoisers X",
    "mean_span_length": "t5: --mean-span-length 2 --denoisers X",
    "relative_attention_num_buckets": "t5: --position-embedding-type learned --relative-attention-num-buckets 8",
    "relative_attention_max_distance": "t5: --position-embedding-type learned --relative-attention-max-distance 99",
    "pipeline_split_rank": "t5: --pipeline-split-rank 1",
    # layout
    "sequence_parallel": "--sequence-parallel",
    "cp_comm_type": "--cp-comm-type a2a",
    "hierarchical_context_parallel_sizes": "--hierarchical-context-parallel-sizes 2 2",
    "pipeline_schedule": "--pipeline-schedule zb-h1",
    "pipeline_auto_schedules": "--pipeline-auto-schedules zb-h1",
    "pipeline_chunks": "--pipeline-chunks 2",
    "pipeline_placement": "--pipeline-placement v",
    "pipeline_schedule_file": "--pipeline-schedule-file x.csv",
    "micro_batch_group_size": "--microbatch-group-size-per-virtual-pipeline-stage 4",
    "pipeline_layout": "--pipeline-model-parallel-layout Et*4L",
    "layers_per_chunk": "--num-layers-per-virtual-pipeline-stage 2",
    "pipeline_trace": "--pipeline-trace x",
    "check_data_agreement": "--check-data-agreement",
    "overlap_grad_reduce": "--no-overlap-grad-reduce",
    "gradient_accumulation_fusion": "--gradient-accumulation-fusion --bf16 --device cpu",
    "allgather_bucket_size": "--allgather-bucket-size 1000",
    "stage3_prefetch_bucket_size": "--stage3-prefetch-bucket-size 0 --zero-stage 2",
    "checkpoint_num_layers": "--checkpoint-num-layers 2",
    "partition_activations": "--partition-activations",
    "checkpoint_in_cpu": "--checkpoint-in-cpu",
    "contiguous_checkpointing": "--contiguous-checkpointing",
    "partition_method": "--partition-method uniform",
    # batch
    "step_batch_size_schedule": "--step-batch-size-schedule 0:4 9999:8 --eval-only --load x",
    "iterations_to_skip": "--iterations-to-skip 3 --eval-only --load x",
    "rampup_batch_size": "--rampup-batch-size 4 4 8 --gas 2 --eval-only --load x",
    "seq_length_schedule": "--seq-length-schedule 0:64;9e9:256",
    "seq_length_curriculum": (
        "--seq-length-curriculum fixed_discrete min_difficulty=8 max_difficulty=64 difficulty=8,64 max_step=9999"
    ),
    "eval_interval": "--eval-interval 5 --eval-iters 0",
    # optimizer
    "min_lr": "--min-lr 1e-5 --lr-decay-style constant",
    "lr_decay_iters": "--lr-decay-iters 9 --lr-decay-style constant --lr-warmup-iters 3",
    "warmup": "--lr-warmup-fraction 0.1 --lr-warmup-iters 3",
    "lr_decay_samples": "--lr-decay-samples 36 --lr-decay-style constant --lr-warmup-samples 8",
    "lr_warmup_rounding": "--lr-warmup-rounding down --lr-warmup-iters 3",
    "train_tokens_lr_unit": "--train-tokens-lr-unit steps",
    "lr_trained_tokens": "--lr-trained-tokens all",
    "lr_wsd_decay_iters": "--lr-wsd-decay-iters 9",
    "lr_wsd_decay_samples": "--lr-wsd-decay-samples 9",
    "lr_wsd_decay_style": "--lr-wsd-decay-style cosine",
    "wsd_decay_fraction": "--wsd-decay-fraction 0.2 --lr-wsd-decay-iters 9 --lr-decay-style wsd",
    "lr_head": "--lr-head 1e-3",
    "decoupled_min_lr": "--decoupled-min-lr 1e-5",
    "adam_beta1": "--adam-beta1 0.8 --optimizer sgd",
    "adam_beta2": "--adam-beta2 0.8 --optimizer sgd",
    "adam_eps": "--adam-eps 1e-6 --optimizer sgd",
    "exp_avg_dtype": "--exp-avg-dtype fp32 --optimizer sgd",
    "exp_avg_sq_dtype": "--exp-avg-sq-dtype fp32 --optimizer sgd",
    "fp8_recipe": "--fp8-recipe blockwise",
    "first_last_layers_bf16": "--first-last-layers-bf16",
    "num_layers_at_start_in_bf16": "--num-layers-at-start-in-bf16 2",
    "num_layers_at_end_in_bf16": "--num-layers-at-end-in-bf16 2 --bf16 --fp8-format e4m3",
    "sgd_momentum": "--sgd-momentum 0.9",
    "muon_momentum": "--muon-momentum 0.9",
    "muon_nesterov": "--muon-no-nesterov",
    "muon_num_ns_steps": "--muon-num-ns-steps 4",
    "muon_coefficient_type": "--muon-coefficient-type quintic",
    "muon_fp32_matmul_prec": "--muon-fp32-matmul-prec medium",
    "muon_scale_mode": "--muon-scale-mode spectral",
    "muon_extra_scale_factor": "--muon-extra-scale-factor 0.2",
    "muon_split_qkv": "--muon-no-split-qkv",
    "muon_split_qkv_heads": "--muon-split-qkv-heads",
    "adaptive_muon_moment2_method": "--adaptive-muon-moment2-method normuon",
    "adaptive_muon_beta2": "--adaptive-muon-beta2 0.9",
    "adaptive_muon_eps": "--adaptive-muon-eps 1e-6 --optimizer muon",
    "zero_stage": "--zero-stage 1",
    "offload_parameters": "--offload-parameters --zero-stage 2",
    "cpu_adam": "--cpu-adam torch --offload-optimizer --optimizer sgd",
    "no_pin_memory": "--no-pin-memory",
    # number format
    **{
        name: f"--{name.replace('_', '-')} 2 --bf16"
        for name in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_scale")
    },
    # data
    "train_data_path": "--train-data-path a --valid-data-path b --train-iters 0 --dry-run",
    "valid_data_path": "--train-data-path a --valid-data-path b --eval-interval 0 --dry-run",
    "test_data_path": "--train-data-path a --valid-data-path b --test-data-path c --eval-iters 0 --dry-run",
    "valid_sft": "--valid-sft x --data-path mock",
    "chat_template": f"--chat-template {__file__}",
    "sft_overlong": "--sft-overlong refuse",
    "split": "--split 9,1,0 --data-path mock",
    "split_by": "--split-by hash --data-path mock",
    "mixture_schedule": "--mixture-schedule 5:1",
    "shuffle_window": "--shuffle-window 8 --data-path mock",
    "json_key": "--json-key content --data-path mock",
    "max_bad_lines": "--max-bad-lines 2 --data-path mock",
    "data_order": "--data-order megatron --data-path mock",
    "no_extra_token": "--no-extra-token",
    "mid_level_dataset_surplus": "--mid-level-dataset-surplus 0.01",
    "data_impl": "--data-impl pread --data-path mock",
    "data_cache_path": "--data-cache-path x --data-path mock",
    "object_storage_cache_path": "--object-storage-cache-path x --data-path a --dry-run",
    "object_storage_cache_gb": "--object-storage-cache-gb 2 --data-path a --dry-run",
    "vocab_file": f"--vocab-file {__file__} --tokenizer-path {__file__}",
    "merge_file": f"--merge-file {__file__} --tokenizer-type TokenizersJSON --tokenizer-path {__file__}",
    "tokenizer_path": f"--tokenizer-path {__file__} --vocab-file {__file__} --merge-file {__file__}",
    "prefetch_factor": "--prefetch-factor 3",
    "fim_spm_rate": "--fim-spm-rate 0.1",
    "reset_position_ids": "--reset-position-ids --packing best-fit",
    "reset_attention_mask": "--reset-attention-mask --packing best-fit",
    "packing": f"--packing best-fit --sft {__file__}",
    "fim_rate": f"--fim-rate 0.1 --sft {__file__}",
    "eod_mask_loss": f"--eod-mask-loss --sft {__file__}",
    "num_workers": "--num-workers 1 --eval-only --load x",
    # checkpoints
    **{
        name: f"{flag} --eval-only --load x"
        for name, flag in {
            "save_interval": "--save-interval 5",
            "save_interval_minutes": "--save-interval-minutes 5",
            "checkpoint_format": "--checkpoint-format native",
            "async_save": "--async-save",
            "on_save_error": "--on-save-error stop",
            "export_hf_interval": "--export-hf-interval 5",
            "save_remote": "--save-remote s3://a/b",
            "load_if_exists": "--load-if-exists",
            "allow_data_change": "--allow-data-change",
            "stability_guard": "--stability-guard skip",
            "stability_sigma": "--stability-sigma 3",
            "stability_window": "--stability-window 9",
            "debug_dump": "--debug-dump x",
            "debug_nan": "--debug-nan",
            "log_layer_norms": "--log-layer-norms",
            "log_document_losses": "--log-document-losses 9",
            "eval_tasks": f"--eval-tasks {__file__}",
            "profile": "--profile 1",
        }.items()
    },
    "strict_load": "--strict-load",
    "no_load_optim": "--no-load-optim --finetune --load x",
    "no_load_rng": "--no-load-rng --finetune --load x",
    "allow_vocab_change": "--allow-vocab-change",
    "load_weights_only": "--load-weights-only",
    "finetune": "--finetune",
    "resize_vocab": "--resize-vocab --load x",
    "eval_only": "--eval-only",
    "lr_warmup_init": "--lr-warmup-init 1e-5 --warmup 0",
    "weight_decay": "--weight-decay 0.1 --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
    "keep_every": "--keep-every 5",
    # checks and logs
    "check_paths": "--check-paths",
    "stability_patience": "--stability-patience 3",
    "drift_interval": "--drift-interval 5",
    "debug_dump_steps": "--debug-dump-steps 3",
    "debug_dump_modules": "--debug-dump-modules a",
    "debug_dump_tensors": "--debug-dump-tensors",
    "eval_tasks_interval": "--eval-tasks-interval 5",
    "prompt_bos": "--no-prompt-bos",
    "prove": "--prove --eval-only --load x",
    "wandb_exp_name": "--wandb-exp-name a",
    "wandb_save_dir": "--wandb-save-dir a",
    "wandb_entity": "--wandb-entity a",
    "swanlab_mode": "--swanlab-mode local",
    "metrics_host": "--metrics-host 0.0.0.0",
}
"""Field -> flags next to which it has no effect on one rank; "t5:" names another family."""
NEVER_SHADOWED = set(
    """
    architecture hidden_size num_attention_heads hidden_bias layernorm_epsilon attention_dropout
    hidden_dropout
    init_method_std untie_embeddings activation make_vocab_size_divisible_by apply_residual_connection_post_layernorm
    lr_step_offset
    loss_chunk_tokens z_loss mtp_num_layers vocab_size num_experts num_query_groups position_embedding_type
    normalization layernorm_1p
    norm_placement embed_layernorm multi_latent_attention softmax_scale attn_logit_softcapping final_logit_softcapping
    scale_embeddings embedding_multiplier residual_scale mup_base_hidden_size clip_qkv
    hybrid_layer_pattern branch_multipliers
    softmax_type v_head_dim attention_value_scale attention_output_gate parallel_residual logit_scale
    attention_temperature_scale qk_clip log_max_attention_logit
    enc_seq_length dec_seq_length enc_layers dec_layers denoisers vocab_extra_ids
    binary_head mask_prob whole_word_masking short_seq_prob
    model_parallel_size pipe_parallel_size context_parallel_size reduce_bucket_size checkpoint_activations
    recompute_granularity compile device fused_kernels distributed_backend step_timeout phase_timeout_minutes
    batch_size gas requested_global_batch_size seq_length train_iters eval_iters
    loss_average optimizer lr lr_decay_style lr_warmup_iters lr_warmup_samples lr_embedding decoupled_lr lr_by_name
    weight_decay_by_name weight_decay_incr_style start_weight_decay end_weight_decay clip_grad offload_optimizer dtype
    fp8_format
    data_path sft tokenizer_type eod_token exclude
    save load resume no_save_optim keep_last
    sample_prompts wandb_project swanlab_project mlflow_tracking_uri metrics_port
    seed deterministic log_interval exit_interval kill_switch_path exit_duration_in_mins tensorboard_dir
    deepspeed_config config callback strict_flags ignore_unknown_flags verbose_deepspeed dry_run prove_only progress
    local_rank
    """.split()
)
"""Fields with an effect next to every value of the others, or whose contradictions are errors of another kind.

Some of them have no effect on some machines or in some layouts (``reduce_bucket_size`` with one replica), which is not
a matter of flags.
"""
LAYOUT_DEPENDENT = (
    "cp_comm_type", "micro_batch_group_size", "overlap_grad_reduce", "zero_stage",
    "gradient_accumulation_fusion", "partition_method", "train_data_path", "valid_data_path", "test_data_path",
    "drift_interval", "seq_length_schedule", "seq_length_curriculum",
)  # fmt: skip
"""Fields that a script passes for several layouts and lengths: a note reports them, and --strict-flags accepts it."""
OPTIONS = {option.name: option for _, option in all_options()}


def parse_line(line: str) -> Config:
    family, _, flags = line.partition(": ") if line.startswith("t5: ") else ("gpt2", "", line)
    return parse(flags.split(), world_size=1, env={}, family=family)


def error_message(line: str) -> str:
    """Return the error of a command line, or nothing."""
    try:
        parse_line(line)
    except ConfigError as error:
        return str(error)
    return ""


def mentions(text: str, field: str) -> bool:
    return any(re.search(rf"{flag}(?![\w-])", text) for flag in OPTIONS[field].flags)


def test_every_field_is_in_exactly_one_table() -> None:
    assert not NEVER_SHADOWED & SHADOWED.keys()
    assert NEVER_SHADOWED | SHADOWED.keys() == OPTIONS.keys()
    assert {name for shadow in SHADOWS for name in shadow.fields} <= SHADOWED.keys()


def test_shadowed_flag_is_reported_and_strict_flags_rejects_it() -> None:
    def check(field: str) -> None:
        line = SHADOWED[field]
        if problem := error_message(line):
            assert mentions(problem, field), problem
            return
        config = parse_line(line)
        reported = [*config.ignored, *config.shadowed]
        if field in LAYOUT_DEPENDENT:
            assert any(mentions(note, field) for note in config.notes) or field == "zero_stage"
            return
        assert any(mentions(flag, field) for flag in reported), (reported, config.notes)
        assert mentions(error_message(f"{line} --strict-flags"), field)

    check_rows(SHADOWED, check)


@pytest.mark.parametrize(
    ("line", "is_reported"),
    [
        ("--train-tokens 999", False),
        ("--train-tokens 999 --lr-warmup-samples 8", False),
        ("--train-tokens 999 --lr-decay-iters 9", True),
        ("--train-tokens 999 --lr-decay-tokens 900", True),
        ("--train-tokens 999 --train-iters 9", True),
        ("--train-tokens 999 --train-samples 8", True),
    ],
)
def test_lr_unit_without_effect_is_reported(line: str, is_reported: bool) -> None:
    line = f"--seq-length 8 --lr-decay-style linear --batch-size 4 {line}"
    units = [f"{line} --train-tokens-lr-unit {unit}" for unit in ("samples", "steps")]
    assert (parse_line(units[0]).optimizer.lr_follows_samples, sample_rates(units[0])) != (
        parse_line(units[1]).optimizer.lr_follows_samples, sample_rates(units[1])
    ) or is_reported  # fmt: skip
    assert ("--train-tokens-lr-unit steps" in parse_line(units[1]).ignored) == is_reported


@functools.cache
def sample_rates(line: str) -> tuple[tuple[float, ...], tuple[str, ...]] | None:
    """Return the learning rates and the reported flags of a command line; None if it is an error."""
    try:
        config = parse_line(line)
    except ConfigError:
        return None
    schedule, samples_per_update = (
        make_lr_scheduler(config),
        config.batch.batch_size if config.optimizer.lr_follows_samples else 1,
    )
    return tuple(schedule.after(samples_per_update * (update + 1)) for update in SAMPLED_UPDATES), tuple(
        config.shadowed
    )


@pytest.mark.parametrize(
    "style",
    ["wsd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("constant", "linear", "inverse-square-root"))],
)
def test_schedule_flag_is_reported_iff_it_changes_no_rate(style: str) -> None:
    """All pairs of flags: if neither of two values of the second one changes a rate, it must be reported."""
    schedule = {
        option.name for option in options_of(OptimizerConfig)
        if re.match(r"(lr|min_lr|warmup|wsd)(_|$)", option.name) and option.name not in GROUP_FIELDS
    }  # fmt: skip
    assert schedule == SCHEDULE_VALUES.keys(), "a new flag of the schedule needs two values here"
    options = [(name, "--" + name.replace("_", "-"), values) for name, values in SCHEDULE_VALUES.items()]
    num_compared = 0
    for (first, first_flag, (first_value, _)), (name, flag, values) in itertools.product(options, options):
        base_line = f"--train-iters 40 --lr 1e-3 --warmup 0.06 --lr-decay-style {style}"
        base_line += f" {first_flag} {first_value}" if first != name else ""
        results = [sample_rates(base_line), *(sample_rates(f"{base_line} {flag} {value}") for value in values)]
        if any(item is None for item in results):
            continue
        (base_rates, _), (first_rates, reported), (second_rates, _) = results  # type: ignore[misc]
        has_no_effect = base_rates == pytest.approx(first_rates, rel=1e-9) and base_rates == pytest.approx(
            second_rates, rel=1e-9
        )
        assert any(mentions(item, name) for item in reported) == has_no_effect, (base_line, flag, values, reported)
        num_compared += 1
    assert num_compared > 60
