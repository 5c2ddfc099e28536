"""Every field of the configuration acts: away from its default it changes what is stated here.

| observable | what is compared |
|---|---|
| plan | the rows of ``--dry-run`` |
| rates | the learning rate at three updates, and what parameters have of their own |
| optimizer | what ``build_optimizer`` is given |
| engine | the dictionary that DeepSpeed's engine is given |
| model | names and shapes of weights, the loss of one forward pass, and what its graph keeps |
| sizes | what the built model knows of itself, where that changes neither its loss nor its graph |
| provider | what the script hands to the data set, and ``samples`` how many of them it is asked for |
| batch | what the script makes of a text |
| loader | the iterator over the training data |
| tokenizer | what the tokenizer is built from |
| place | the run folder and the checkpoint that it starts from, or why there is none |
| saves | which state is taken up, and what is said and done about saves |

A field that acts in a run alone stands in ``READING_MODULES``, with the module that reads it: nothing is trained here.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain_gpt2
import pretrain_t5
from examples.bert import pretrain_bert
from examples.llama import pretrain_llama
from examples.mpt import pretrain_mpt
from megatron import data, device, mpu, tokenizer
from megatron.arguments.deepspeed_json import engine_dict
from megatron.arguments.flag_values import accepts_option, all_options, all_sections
from megatron.checkpoint.retention import make_retention_policy
from megatron.config import Config, parse
from megatron.config.option import Option
from megatron.data.mock_dataset import MockTokenizer
from megatron.errors import CheckpointError, ConfigError
from megatron.models import registry
from megatron.models.bert import data as bert_data
from megatron.models.registry import FAMILIES
from megatron.models.t5 import span_files
from megatron.mpu.groups import single_grid
from megatron.mpu.topology import Topology
from megatron.optim.param_rates import RateTable
from megatron.tokenizer import chat
from megatron.training import (
    batch_iterators,
    fused_kernels,
    global_vars,
    optimizer_setup,
    run_folder,
    setup,
    start_table,
    vocabulary,
)
from megatron.training import data as training_data
from megatron.training.callbacks.stability_guard import StabilityGuard
from megatron.training.data import RunData, num_samples_of_splits
from megatron.training.dry_run import plan_rows
from megatron.training.mock_data import random_data
from megatron.training.restore_options import RestoreOptions
from megatron.training.world import World
from tests.arguments.test_flags_table import FAMILY_REQUIRED_FLAGS, REQUIRED_FLAGS, sample_value
from tests.helpers.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "gpt2": pretrain_gpt2,
    "t5": pretrain_t5,
    "llama": pretrain_llama,
    "mpt": pretrain_mpt,
    "bert": pretrain_bert,
}
MODEL_FLAGS = "--vocab-size 101 --num-layers 2 --hidden-size 16 --num-attention-heads 4 --train-iters 40"
BASE_FLAGS = "--seq-length 8 --init-method-std 0.5"
FAMILY_FLAGS = {"t5": "--enc-seq-length 12 --vocab-size 200"}
WORLD = World("cpu", torch.device("cpu"), single_grid(), 0)
OBSERVED_FIELDS = {
    "plan": """
        model_parallel_size sequence_parallel pipe_parallel_size pipeline_schedule pipeline_auto_schedules
        pipeline_chunks layers_per_chunk
        pipeline_placement pipeline_schedule_file pipeline_layout micro_batch_group_size
        context_parallel_size cp_comm_type
        partition_method batch_size gas requested_global_batch_size rampup_batch_size
        step_batch_size_schedule iterations_to_skip seq_length pipeline_split_rank
    """,
    "rates": """
        config train_iters lr min_lr lr_decay_style lr_decay_iters lr_decay_samples warmup lr_warmup_rounding
        lr_warmup_iters lr_warmup_init lr_step_offset
        lr_warmup_samples wsd_decay_fraction lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style
        lr_embedding lr_head decoupled_lr decoupled_min_lr lr_by_name weight_decay_by_name
        weight_decay_incr_style start_weight_decay end_weight_decay
    """,
    "optimizer": """
        optimizer weight_decay adam_beta1 adam_beta2 adam_eps clip_grad zero_stage offload_optimizer offload_parameters
        muon_momentum muon_nesterov muon_num_ns_steps muon_scale_mode muon_extra_scale_factor muon_split_qkv
        muon_split_qkv_heads muon_coefficient_type muon_fp32_matmul_prec adaptive_muon_moment2_method
        adaptive_muon_beta2 adaptive_muon_eps sgd_momentum exp_avg_dtype exp_avg_sq_dtype
        cpu_adam no_pin_memory overlap_grad_reduce dtype loss_scale initial_scale_power loss_scale_window hysteresis
        min_scale fused_kernels reduce_bucket_size allgather_bucket_size gradient_accumulation_fusion
        stage3_prefetch_bucket_size
    """,
    "engine": "pipeline_trace check_data_agreement log_interval deepspeed_config",
    "model": """
        architecture
        num_layers hidden_size num_attention_heads kv_hidden_size ff_hidden_size hidden_bias max_position_embeddings
        layernorm_epsilon attention_dropout hidden_dropout layout_independent_dropout init_method_std untie_embeddings
        activation make_vocab_size_divisible_by apply_residual_connection_post_layernorm vocab_size enc_layers
        dec_layers relative_attention_num_buckets relative_attention_max_distance binary_head
        num_query_groups position_embedding_type rotary_base rotary_scaling rotary_scaling_factor
        rotary_low_frequency_factor rotary_high_frequency_factor rotary_original_positions rotary_beta_fast
        rotary_beta_slow rotary_attention_factor rotary_percent rotary_local_base alibi_bias_max normalization
        norm_bias norm_placement embed_layernorm qk_norm add_qkv_bias window_size window_attn_skip_freq softmax_scale
        attn_logit_softcapping final_logit_softcapping scale_embeddings clip_qkv embedding_multiplier residual_scale
        dim_model_base mup_base_hidden_size mup_base_head_dim z_loss
        mtp_num_layers
        num_experts moe_ffn_hidden_size moe_layer_freq moe_router_topk moe_router_score_function moe_router_pre_softmax
        moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias
        moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_expert_capacity_factor
        moe_token_drop_policy moe_min_capacity moe_shared_expert_intermediate_size moe_shared_expert_gate
        moe_router_group_score_topk moe_use_residual
        softmax_type attention_output_gate no_rope_freq rotary_interleaved rotary_truncate qk_norm_order
        activation_func_clamp_value glu_linear_offset parallel_residual logit_scale attention_temperature_scale
        attention_temperature_floor rotary_short_factors rotary_long_factors
        multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim mscale mscale_all_dim
        latent_norm_epsilon sink_layers window_num_query_groups attention_value_scale
        experimental_attention_variant linear_attention_freq hybrid_layer_pattern linear_conv_kernel_dim
        linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads linear_allow_neg_eigval
        linear_norm_epsilon linear_norm_placement linear_full_rank_gates linear_decay_limit mamba_state_dim
        mamba_head_dim mamba_num_groups mamba_num_heads mamba_conv_kernel_dim mamba_conv_bias mamba_proj_bias mamba_norm
        mamba_norm_groups mamba_dt_limit_min mamba_dt_limit_max branch_multipliers
        checkpoint_activations checkpoint_num_layers recompute_granularity seed
    """,
    "sizes": """
        moe_router_bias_update_rate layernorm_1p loss_chunk_tokens partition_activations checkpoint_in_cpu
        contiguous_checkpointing mtp_loss_scaling_factor qk_clip qk_clip_threshold qk_clip_alpha qk_clip_bound
        log_max_attention_logit
    """,
    "provider": """
        enc_seq_length dec_seq_length noise_density mean_span_length denoisers vocab_extra_ids mask_prob
        whole_word_masking short_seq_prob data_path train_data_path valid_data_path test_data_path split split_by
        mixture_schedule shuffle_window data_order mid_level_dataset_surplus no_extra_token data_impl data_cache_path
        object_storage_cache_path object_storage_cache_gb packing fim_rate fim_spm_rate sft valid_sft chat_template
        sft_overlong
    """,
    "samples": "eval_iters eval_interval",
    "batch": "reset_position_ids reset_attention_mask eod_mask_loss",
    "loader": "num_workers prefetch_factor seq_length_schedule seq_length_curriculum",
    "tokenizer": "tokenizer_type vocab_file merge_file tokenizer_path",
    "place": "save load resume load_if_exists checkpoint_format tensorboard_dir",
    "saves": """
        save_interval save_interval_minutes async_save no_load_optim no_load_rng load_weights_only finetune eval_only
        keep_last keep_every
    """,
    "guard": "stability_guard stability_sigma stability_window stability_patience",
    "device": "device compile",
}
"""Observable -> the fields that change it."""
READING_MODULES = {
    **dict.fromkeys(
        (
            "fp8_format",
            "fp8_recipe",
            "first_last_layers_bf16",
            "num_layers_at_start_in_bf16",
            "num_layers_at_end_in_bf16",
        ),
        "config/optimizer.py",
    ),
    "loss_average": "training/setup.py",
    "expert_model_parallel_size": "config/experts.py",
    "moe_eval_capacity_factor": "config/experts.py",
    "expert_tensor_parallel_size": "config/config.py",
    "hierarchical_context_parallel_sizes": "arguments/validate.py",
    "apply_wd_to_qk_layernorm": "training/optimizer_setup.py",
    "distributed_backend": "training/initialize.py",
    "step_timeout": "training/timeouts.py:step_timeout_s",
    "phase_timeout_minutes": "training/timeouts.py:phase_timeout_s",
    "on_save_error": "training/callbacks/checkpointer.py",
    "strict_load": "training/resume.py",
    "allow_data_change": "training/resume.py",
    "allow_vocab_change": "training/resume.py",
    "resize_vocab": "training/resume.py",
    "no_save_optim": "training/capture.py",
    "export_hf_interval": "training/run_callbacks.py",
    "save_remote": "training/run_callbacks.py",
    "drift_interval": "training/run_callbacks.py",
    "debug_dump": "training/callbacks/debugger.py",
    "debug_dump_steps": "training/callbacks/debugger.py:steps()",
    "debug_dump_modules": "training/callbacks/debugger.py:name_pattern()",
    "debug_dump_tensors": "training/callbacks/debugger.py",
    "debug_nan": "training/callbacks/debugger.py",
    "log_layer_norms": "training/run_callbacks.py",
    "log_document_losses": "training/run_callbacks.py",
    "profile": "training/run_callbacks.py:profiled_steps()",
    "sample_prompts": "training/run_callbacks.py",
    "prompt_bos": "training/callbacks/text_samples.py",
    "eod_token": "training/end_of_document.py",
    "json_key": "training/global_vars.py",
    "max_bad_lines": "training/global_vars.py",
    "eval_tasks": "training/run_callbacks.py",
    "eval_tasks_interval": "training/run_callbacks.py",
    "wandb_project": "training/callbacks/wandb.py",
    "wandb_exp_name": "training/callbacks/wandb.py",
    "wandb_save_dir": "training/callbacks/wandb.py",
    "wandb_entity": "training/callbacks/wandb.py",
    "swanlab_project": "training/callbacks/swanlab.py",
    "swanlab_mode": "training/callbacks/swanlab.py",
    "mlflow_tracking_uri": "training/callbacks/mlflow.py",
    "metrics_port": "training/callbacks/open_metrics.py",
    "metrics_host": "training/callbacks/open_metrics.py",
    "exclude": "training/global_vars.py",
    "deterministic": "training/determinism.py",
    "exit_interval": "training/startup.py",
    "exit_duration_in_mins": "training/startup.py",
    "kill_switch_path": "training/startup.py",
    "callback": "training/startup.py",
    "strict_flags": "arguments/parser.py",
    "ignore_unknown_flags": "config/run.py",
    "train_tokens_lr_unit": "arguments/translate.py",
    "lr_trained_tokens": "training/optimizer_setup.py",
    "verbose_deepspeed": "training/deepspeed_engine.py",
    "dry_run": "training/startup.py",
    "check_paths": "training/dry_run.py",
    "prove": "training/proof/policy.py",
    "prove_only": "training/startup.py",
    "progress": "training/run_callbacks.py",
    "local_rank": "training/initialize.py",
}
"""Field -> the module that reads it in a run, and the property or method of its section by which it does."""
NO_EFFECT: dict[str, str] = {}
"""Field -> why it changes nothing."""

COMPANION_FLAGS = {
    "dec_seq_length": "--enc-seq-length 6",
    "hidden_size": "--kv-hidden-size 8",
    "num_attention_heads": "--kv-hidden-size 8",
    "lr_head": "--untie-embeddings-and-output-weights",
    "lr_warmup_init": "--warmup 0.5",
    "weight_decay_incr_style": "--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.1",
    "start_weight_decay": "--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.1",
    "end_weight_decay": "--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.1",
    "initial_scale_power": "--fp16",
    "loss_scale_window": "--fp16",
    "hysteresis": "--fp16",
    "min_scale": "--fp16",
    "loss_scale": "--fp16",
    "load_if_exists": "--load nowhere",
    "tokenizer_type": "--vocab-file {folder}/file.json",
    "merge_file": "--vocab-file {folder}/file.json",
    "data_path": "--dry-run",
    "mixture_schedule": "--data-path 1 a 1 b --dry-run",
    "data_order": "--data-path a --dry-run",
    "shuffle_window": "--data-path a --dry-run",
    "no_extra_token": "--data-order megatron --data-path a --dry-run",
    "mid_level_dataset_surplus": "--data-order megatron --data-path 1 a 1 b --dry-run",
    "num_query_groups": "",
    "sink_layers": "--softmax-type learnable --window-size 3 --window-attn-skip-freq 2",
    "partition_method": "--pipe-parallel-size 2 --num-layers 6",
    "pipeline_schedule": "--pipe-parallel-size 2 --gas 4",
    "pipeline_auto_schedules": "--pipe-parallel-size 2 --gas 4 --pipeline-schedule auto",
    "pipeline_placement": "--pipe-parallel-size 2 --num-layers 4",
    "pipeline_schedule_file": "--pipe-parallel-size 2 --num-layers 4 --gas 1",
    "pipeline_layout": "--pipe-parallel-size 2 --num-layers 4",
    "micro_batch_group_size": "--pipe-parallel-size 2 --num-layers 4 --pipeline-chunks 2 --gas 12",
    "pipeline_split_rank": "--pipe-parallel-size 4 --num-layers 4",
    "cp_comm_type": "--context-parallel-size 2",
    "moe_layer_freq": "--num-experts 8 --num-layers 4",
    "moe_min_capacity": "--num-experts 8 --moe-expert-capacity-factor 0.1",
    "moe_router_num_groups": "--num-experts 8 --moe-router-num-groups 2 --moe-router-group-topk 1",
    "moe_router_group_topk": "--num-experts 8 --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 4",
    "moe_router_group_score_topk": (
        "--num-experts 8 --moe-router-topk 2 --moe-router-num-groups 2 --moe-router-group-topk 1 --init-method-std 2"
    ),
    "relative_attention_max_distance": "--relative-attention-num-buckets 8",
    "attention_temperature_scale": "--position-embedding-type rope --attention-temperature-scale 0.1 "
    "--attention-temperature-floor 3",
    "rotary_long_factors": "--position-embedding-type rope --kv-hidden-size 4 --rotary-scaling longrope "
    "--rotary-short-factors [1.0,2.0] --rotary-long-factors [1.0,3.0] --rotary-original-positions 4",
    **{
        f"rotary_{name}": f"--position-embedding-type rope --rotary-original-positions {length} --rotary-scaling {kind}"
        for kind, length, names in (
            ("llama3", 1000, ("low_frequency_factor", "high_frequency_factor")),
            ("yarn", 10000, ("beta_fast", "beta_slow", "attention_factor", "truncate")),
        )
        for name in names
    },
}
"""Field -> flags without which it is refused or does nothing, before and after; else those of ``test_flags_table``."""
FIELD_VALUES = {
    "activation": "relu",
    "weight_decay_incr_style": "cosine",
    "seq_length_schedule": "0:4;9:8",
    "seq_length_curriculum": "fixed_linear min_difficulty=2 max_difficulty=4 total_curriculum_step=5 difficulty_step=2",
    "dtype": "bf16",
    "device": "cuda",
    "data_path": "1 a 1 b",
    "eval_interval": "0",
    "loss_scale": "8",
    "make_vocab_size_divisible_by": "8",
    "load": "nowhere",
    "fused_kernels": "apex",
    "vocab_extra_ids": "90",
    "vocab_size": "120",
    "rotary_original_positions": "4",
    "rotary_beta_fast": "10",
    "rotary_beta_slow": "20",
    "window_size": "3",
    "linear_norm_placement": "after",
    "mamba_dt_limit_max": "0.01",
    "activation_func_clamp_value": "0.1",
    "tensorboard_dir": "{folder}/file.json/events",
    "config": "{folder}/flags.json",
    "deepspeed_config": "{folder}/deepspeed.json",
    "checkpoint_format": "deepspeed",
    "layers_per_chunk": "3",
    "lr_decay_samples": "60",
    "lr_warmup_samples": "18",
    "lr_wsd_decay_samples": "20",
    "num_query_groups": "2",
    "pipeline_schedule": "gpipe",
    "pipeline_placement": "v",
    "pipeline_layout": "Et|tttL",
    "enc_seq_length": "20",
    "moe_router_group_score_topk": "1",
    "split": "8,1,1",
}
"""Field -> the value that it is given, where ``test_flags_table`` has one that would not show."""


def to_comparable(value: Any) -> Any:
    """Return what can be compared: fields, numbers and names of ``value``, however deep."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_comparable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_comparable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_comparable(item) for item in value]
    if isinstance(value, torch.Tensor):
        return [value.shape, value.double().sum().item(), value.tolist() if value.numel() < 200 else 0]
    if isinstance(value, functools.partial):
        return to_comparable([value.func, value.args, value.keywords])
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return repr(value) if type(value).__repr__ is not object.__repr__ else to_comparable(vars(value))


def plan(config: Config) -> Any:
    parallel = config.parallel
    axis_sizes = parallel.model_parallel_size, parallel.num_stages, parallel.context_parallel_size
    topology = Topology.from_world_size(parallel.replica_size, *axis_sizes)
    return [*plan_rows(config, topology, registry.bounds_of(config, topology.pipe), "fp32")]


def rates(config: Config) -> Any:
    schedule = optimizer_setup.make_lr_scheduler(config)
    decay = optimizer_setup.make_weight_decay_schedule(config, 1)
    decays = None if decay is None else [decay.after(update) for update in (2, 25, 37)]
    return [schedule.at(update) for update in (2, 25, 37)], decays, to_comparable(RateTable.of(config))


def optimizer(config: Config) -> Any:
    captured: list[Any] = []
    optimizer_setup.build_optimizer = lambda parameters, **kwargs: captured.append(kwargs)
    config = dataclasses.replace(
        config, precision=dataclasses.replace(config.precision, dtype=config.precision.dtype or "fp32")
    )
    optimizer_setup.make_optimizer(config, torch.nn.Linear(1, 1), WORLD)
    kwargs = {name: value for name, value in captured[0].items() if name not in ("model", "tensor", "data")}
    return to_comparable([kwargs, fused_kernels.uses_apex_adam(config)])


def engine(config: Config) -> Any:
    return engine_dict(config, config.parallel.num_stages)


def build_model(config: Config) -> Any:
    """Return the script's model of one rank, its weights filled."""
    global_vars.set_current(config, mock_tokenizer(config), setup.make_streams(config, WORLD))
    module = SCRIPTS[config.family].model_provider()
    setup.initialize_and_move(config, module, WORLD)
    return module


def mock_tokenizer(config: Config) -> MockTokenizer:
    return MockTokenizer(60, control_tokens={"<|endoftext|>": 0})


def model(config: Config) -> Any:
    module, script, num_saved = build_model(config), SCRIPTS[config.family], 0
    run_data = RunData({"train": random_data(config, 0)}, None)

    def count_saved(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal num_saved
        num_saved += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count_saved, lambda tensor: tensor):
        loss, _ = script.forward_step(run_data.batches("train", config, WORLD), module)
    return {name: p.shape for name, p in module.named_parameters()}, to_comparable(loss), num_saved


def sizes(config: Config) -> Any:
    return to_comparable(build_model(config).model_args)


def provider(config: Config) -> Any:
    values: list[Any] = []
    modules = ((data, ""), (span_files, "t5_"), (bert_data, "bert_"))
    for module, family in modules:
        name = f"build_{family}train_valid_test"
        setattr(module, name, lambda *args, **kwargs: values.append((args, kwargs)) or (None, None, None))
    data.build_sft_train_valid_test = data.build_train_valid_test
    chat.find_template = lambda _, values: values  # type: ignore[assignment, return-value]
    data.fim_from = lambda _, *rates: rates  # type: ignore[assignment]
    bert_data.bert_tokens = lambda _: None  # type: ignore[assignment]
    tokenizer.word_starts = lambda _: "the starts of words"  # type: ignore[assignment]
    global_vars.set_current(config, mock_tokenizer(config), None)
    SCRIPTS[config.family].train_valid_test_datasets_provider([1, 1, 1])
    return to_comparable(values)


def samples(config: Config) -> Any:
    return num_samples_of_splits(config, WORLD)


def batch(config: Config) -> Any:
    global_vars.set_current(config, mock_tokenizer(config), None)
    length = config.batch.seq_length + 1
    tokens = torch.arange(2 * length).view(2, length) % 7
    return to_comparable(SCRIPTS[config.family].get_batch({"text": tokens}))


def loader(config: Config) -> Any:
    batch_iterators.TimedBatches = lambda source: source  # type: ignore[assignment, misc]
    batches: Any = RunData({"train": np.zeros((9, 9))}, None).batches("train", config, WORLD)
    return to_comparable({name: value for name, value in vars(batches.source).items() if name != "dataset"})


def tokenizer_(config: Config) -> Any:
    calls: list[Any] = []
    vocabulary.build = lambda *args, **kwargs: calls.append((args, kwargs)) or mock_tokenizer(config)  # type: ignore
    vocabulary.choose_eod = lambda *_: None  # type: ignore[assignment]
    vocabulary.with_tokenizer(config)
    return calls


def place(config: Config) -> Any:
    try:
        return run_folder.choose(config, "a run", WORLD)
    except (CheckpointError, ConfigError) as error:
        return str(error)


def saves(config: Config) -> Any:
    flags = config.checkpoint
    return (
        RestoreOptions.from_flags(flags),
        make_retention_policy(flags),
        start_table._saves_row(flags),
        num_samples_of_splits(config, WORLD),
    )


def guard(config: Config) -> Any:
    instance = StabilityGuard(config.stability)
    settings = instance.settings
    return to_comparable(
        [settings.stability_patience, settings.is_guarded, vars(instance.losses), vars(instance.norms)]
    )


def device_(config: Config) -> Any:
    compiled: list[bool] = []
    setup.compile_layers = lambda *_, **__: compiled.append(True)
    setup.make_optimizer = lambda *_: None  # type: ignore[assignment]
    streams = setup.make_streams(config, WORLD)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    setup.build_weights(config, WORLD, streams, SCRIPTS[config.family].model_provider)
    try:
        return device.choose(config.parallel.device), compiled
    except ValueError as error:
        return str(error)


OBSERVABLES: dict[str, Callable[[Config], Any]] = {
    **{item.__name__.rstrip("_"): item for item in (plan, rates, optimizer, engine, model, sizes, provider, samples)},
    **{item.__name__.rstrip("_"): item for item in (batch, loader, tokenizer_, place, saves, guard, device_)},
}
OPTIONS = {option.name: (section, option) for section, option in all_options()}
OBSERVABLE_OF_FIELD = {field: observable for observable, fields in OBSERVED_FIELDS.items() for field in fields.split()}


DISABLING_FLAGS = {
    "overlap_grad_reduce": "--no-overlap-grad-reduce",
    "muon_nesterov": "--muon-no-nesterov",
    "muon_split_qkv": "--muon-no-split-qkv",
}
"""Of fields that are on by themselves: the flag that switches them off."""


def command_lines(option: Option, folder: Path) -> tuple[list[str], list[str]]:
    """Return the command line beside which ``option`` acts, and that with the option given as well."""
    family, flag = option_family(option), option.flag or next(iter(option.constants))
    flag = DISABLING_FLAGS.get(option.name, flag)
    required_flags = REQUIRED_FLAGS.get(flag, []) + FAMILY_REQUIRED_FLAGS[family].get(flag, [])
    base_words = (
        COMPANION_FLAGS[option.name].format(folder=folder).split() if option.name in COMPANION_FLAGS else required_flags
    )
    if option.value_type == "bool" or flag in option.constants:
        flag_words = [flag]
    elif option.name in FIELD_VALUES:
        flag_words = [flag, *FIELD_VALUES[option.name].format(folder=folder).split()]
    else:
        flag_words = [flag, sample_value(option, folder)]
    common_words = f"{MODEL_FLAGS} {FAMILY_FLAGS.get(family, BASE_FLAGS)}".split()
    base_words = [*common_words, *([] if "--save" in flag_words else ["--save", str(folder / "run")]), *base_words]
    return base_words, [*base_words, *flag_words]


def option_family(option: Option) -> str:
    section, _ = OPTIONS[option.name]
    return next(family for family in FAMILIES if accepts_option(family, section, option))


def parse_words(words: list[str], family: str) -> Config:
    axes = ("--pipe-parallel-size", "--model-parallel-size", "--context-parallel-size")
    axis_sizes = [max(int(words[words.index(flag) + 1]), 1) for flag in axes if flag in words]
    return parse(words, world_size=prod(axis_sizes), env={}, family=family, accepts_model="--model" in words)


def observe_all(rank: int, fields: list[str], folder: Path) -> dict[str, tuple[str, str]]:
    """Return the observable of each field without and with it; twice the error where it cannot be made."""
    mpu.initialize_model_parallel()
    results = {}
    for field in fields:
        option, observable = OPTIONS[field][1], OBSERVABLES[OBSERVABLE_OF_FIELD[field]]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            for module, names in PATCHED_NAMES.items():
                for name in names.split():
                    patch.setattr(module, name, getattr(module, name))  # so that it is put back
            try:
                lines = [parse_words(words, option_family(option)) for words in command_lines(option, folder)]
                before, after = (repr(observable(config)) for config in lines)
            except Exception as error:
                before = after = f"{type(error).__name__}: {error}"
        results[field] = before, after
    return results


PATCHED_NAMES: dict[Any, str] = {
    setup: "compile_layers make_optimizer",
    optimizer_setup: "build_optimizer",
    chat: "find_template",
    data: "build_train_valid_test build_sft_train_valid_test fim_from",
    span_files: "build_t5_train_valid_test",
    bert_data: "build_bert_train_valid_test bert_tokens",
    tokenizer: "word_starts",
    training_data: "TimedBatches",
    vocabulary: "build choose_eod",
}
"""What observables put in place of our own."""


def test_every_field_is_classified_once() -> None:
    """A new field needs a row here: in ``OBSERVED_FIELDS`` under what it changes, else in one of the other two."""
    classified = [field for fields in OBSERVED_FIELDS.values() for field in fields.split()] + [
        *READING_MODULES,
        *NO_EFFECT,
    ]
    assert sorted(classified) == sorted(OPTIONS)
    assert OBSERVED_FIELDS.keys() == OBSERVABLES.keys()


def test_every_field_changes_observable(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text("{}")
    (tmp_path / "flags.json").write_text('{"lr": 0.5}')
    (tmp_path / "deepspeed.json").write_text('{"steps_per_print": 3}')
    results = run_ranks(1, observe_all, sorted(OBSERVABLE_OF_FIELD), tmp_path, init=False)[0]
    unchanged = {field: before[:300] for field, (before, after) in results.items() if before == after}
    assert not unchanged, "a flag changes nothing of what is stated for it"
    addresses = {field: before[:300] for field, (before, _) in results.items() if " at 0x" in before}
    assert not addresses, "an address differs even if nothing changes"


@pytest.mark.parametrize("field", READING_MODULES)
def test_runtime_field_is_read_in_named_module(field: str, tmp_path: Path) -> None:
    file, _, name = READING_MODULES[field].partition(":")
    tree = ast.parse((ROOT / "megatron" / file).read_text(encoding="utf-8"))
    read_names = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    assert (name.removesuffix("()") or field) in read_names
    if not name:
        return
    section, option = OPTIONS[field]
    value, _ = option.convert(sample_value(option, tmp_path), option.flag)
    section_class: Any = all_sections()[section]
    values = [getattr(item, name.removesuffix("()")) for item in (section_class(), section_class(**{field: value}))]
    assert len({repr(item() if name.endswith("()") else item) for item in values}) == 2
