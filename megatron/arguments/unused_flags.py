"""Errors and notes about settings that would have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.arguments.deepspeed_keys import FP16, PASSED_TO_ENGINE, UNUSED_PIPELINE_KEYS, engine_features
from megatron.config.config import Config
from megatron.config.data import PATHS, SCRIPT_DATA, SPLIT_PATH_FIELDS
from megatron.config.data_paths import parse_paths, parse_schedule
from megatron.config.debug import DEBUG_IN_TRAINING, DUMP_ONLY
from megatron.config.logging import LOGGING_IN_TRAINING
from megatron.config.option import LARGEST_INT
from megatron.config.parallel import ParallelConfig

# Data settings that would have no effect, and paths that the run needs but does not have.

TOKEN_FILE_FIELDS = (
    "split",
    "split_by",
    "data_impl",
    "data_cache_path",
    "object_storage_cache_path",
    "object_storage_cache_gb",
    "packing",
    "fim_rate",
    "fim_spm_rate",
)
"""Fields that apply to token files, not to data that a script provides itself."""
CONVERSATION_FIELDS = ("valid_sft", "chat_template", "sft_overlong")
"""Fields that apply to conversations only."""
TOKEN_FILE_ONLY_FIELDS = (
    "data_impl", "packing", "fim_rate", "fim_spm_rate", "reset_position_ids", "reset_attention_mask", "eod_mask_loss",
)  # fmt: skip
"""Fields that apply to token files only. Conversations are always packed best-fit, without attention between them."""


def data_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each data flag without effect, and for incomplete sets of data paths."""
    explicit, data = config.explicit_fields, config.data
    yield from _path_problems(config)
    yield from _sft_problems(config)
    flags = [*_flags(config, TOKEN_FILE_FIELDS), *_flags(config, ("mixture_schedule",))]
    if flags and data.is_script_data:
        yield (
            f"{', '.join(flags)} applies to token files only, got --data-path {SCRIPT_DATA}. Remove it, or set "
            "--data-path to token files"
        )
    elif "mixture_schedule" in explicit and data.training_path is None:
        yield (
            "--mixture-schedule needs several corpora, got no --data-path. Remove it, or list several corpora with "
            "weights, such as 0.7 a 0.3 b"
        )
    if "prefetch_factor" in explicit and not data.num_reading_processes:
        yield "--prefetch-factor has no effect without --num-workers 1 or more, got 0. Remove it, or add --num-workers"
    if "fim_spm_rate" in explicit and not data.fim_rate:
        yield "--fim-spm-rate has no effect without --fim-rate above 0. Remove it, or add --fim-rate"
    checkpoint = config.checkpoint
    restart_flag = "--finetune" if checkpoint.finetune else "--eval-only" if checkpoint.eval_only else None
    if checkpoint.allow_data_change and restart_flag:
        yield (
            f"--allow-data-change has no effect with {restart_flag}, which does not continue at the checkpoint's "
            "samples. Remove it"
        )


def data_notes(config: Config, world_size: int) -> Iterator[str]:
    """Yield a note for each data setting that has no effect in this run but may have one in the script's other runs."""
    data, reads = config.data, splits_read(config)
    paths, flag = data.corpora, "test set with --valid-sft" if data.sft else "--test-data-path"
    if reads["test_data_path"] and paths["valid_data_path"] and not (paths["data_path"] or paths["test_data_path"]):
        yield f"the test evaluation at the end is skipped: there is no {flag}"
    yield from _empty_split_notes(config)
    unread = [flag for name, flag in PATHS.items() if name in config.explicit_fields and not reads.get(name, True)]
    if unread:
        yield f"{', '.join(unread)} has no effect: this run does not read these splits"
    if data.mixture_schedule is not None and data.training_path is not None and not config.checkpoint.eval_only:
        yield from _late_step_notes(config, world_size)
    if config.batch.seq_length_schedule is not None and not config.checkpoint.eval_only:
        yield from _late_length_notes(config, world_size)
    if config.batch.seq_length_curriculum is not None and not config.checkpoint.eval_only:
        yield from _late_curriculum_notes(config)


def _empty_split_notes(config: Config) -> Iterator[str]:
    """Yield a note for each evaluation that is skipped because --split assigns no documents to it."""
    reads, shares = splits_read(config), config.data.split_shares
    for name, share, event in zip(
        SPLIT_PATH_FIELDS[1:], shares[1:], ("validation", "the test evaluation at the end"), strict=True
    ):
        if reads[name] and not share and not config.checkpoint.eval_only:
            yield f"{event} is skipped: --split {config.data.split} assigns no documents to that split"


def splits_read(config: Config) -> dict[str, bool]:
    """Determine which splits will be read, by field: --train-data-path, --valid-data-path and --test-data-path."""
    batch, eval_only = config.batch, config.checkpoint.eval_only
    trains, evaluates = batch.train_iters > 0 and not eval_only, batch.eval_iters > 0
    validates = evaluates and batch.eval_interval > 0 and not eval_only
    return dict(zip(SPLIT_PATH_FIELDS, (trains, validates, evaluates), strict=True))


def _sft_problems(config: Config) -> Iterator[str]:
    data = config.data
    if data.sft is None:
        flags = _flags(config, CONVERSATION_FIELDS)
        if flags:
            yield f"{', '.join(flags)} has no effect without --sft. Remove it, or add --sft FILE"
        return
    flags = _flags(config, TOKEN_FILE_ONLY_FIELDS)
    if flags:
        yield (
            f"{', '.join(flags)} applies to token files only, got --sft: conversations are packed best-fit and kept "
            "separate, with positions from 0 in each. Remove it"
        )
    flags = _flags(config, ("split", "split_by")) if data.valid_sft is not None else []
    if flags:
        yield (
            f"{', '.join(flags)} divides the files of --sft, got --valid-sft too, which sets the validation split. "
            "Remove one of them"
        )


def _path_problems(config: Config) -> Iterator[str]:
    data, flags = config.data, _flags(config, ("split", "split_by"))
    explicit_paths = [name for name in SPLIT_PATH_FIELDS if getattr(data, name) is not None]
    if not explicit_paths or data.data_path is not None:
        return
    if flags:
        yield (
            f"{', '.join(flags)} applies to --data-path only, got a path for each split. Remove it, or use --data-path"
        )
    missing = [PATHS[name] for name, is_read in splits_read(config).items() if is_read and name not in explicit_paths]
    # As in Megatron, a run without test data skips the test at its end.
    if "valid_data_path" in explicit_paths and not config.checkpoint.eval_only:
        missing = [flag for flag in missing if flag != PATHS["test_data_path"]]
    if missing:
        alternative = "" if missing == [PATHS["train_data_path"]] else ", or disable evaluation (--eval-iters 0)"
        got, them = ", ".join(PATHS[name] for name in explicit_paths), "them" if len(missing) > 1 else "it"
        yield (
            f"each split that is read needs a path, got {got} without {' and '.join(missing)}. Add {them} "
            f"too{alternative}, or use --data-path, which --split divides into three splits"
        )


def _late_step_notes(config: Config, world_size: int) -> Iterator[str]:
    data, parallel = config.data, config.parallel
    batch_sizes = config.batch.batch_sizes(parallel.data_parallel_size(world_size))
    samples, tokens_per_sample = batch_sizes.consumed_after(config.batch.train_iters), config.tokens_per_sample
    steps = parse_schedule(data.mixture_schedule or "", len(parse_paths(data.training_path or "")))
    late = [str(tokens) for tokens, _ in steps if -(-tokens // tokens_per_sample) >= samples]
    if late:
        yield (
            f"--mixture-schedule: the run ends after {samples * tokens_per_sample} tokens, so the weights from "
            f"{', '.join(late)} on have no effect"
        )


def _late_length_notes(config: Config, world_size: int) -> Iterator[str]:
    samples = config.batch.batch_sizes(config.parallel.data_parallel_size(world_size)).consumed_after(
        config.batch.train_iters
    )
    late = [str(length) for _, sample, length in config.batch.seq_lengths.starts() if sample >= samples]
    if late and config.batch.train_iters:
        yield (
            f"--seq-length-schedule: the run ends after {samples * config.tokens_per_sample} tokens, so the lengths "
            f"{', '.join(late)} have no effect"
        )


def _late_curriculum_notes(config: Config) -> Iterator[str]:
    steps = config.batch.train_iters
    late = [(first, length) for first, length in config.batch.seq_lengths.curriculum if first > steps]
    if late and steps:
        yield (
            f"--seq-length-curriculum: the run ends after step {steps}, so the lengths from {late[0][1]} on, which the "
            f"curriculum reaches in step {late[0][0]}, have no effect"
        )


def _flags(config: Config, names: tuple[str, ...]) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name in names if name in config.explicit_fields]


# Settings that would have no effect: an error if the user must have meant something else, otherwise a note.
#
# Notes cover flags that scripts always pass (dynamic loss scale, minimum learning rate), and a JSON or a command line
# that is used for several layouts.

SCALING = ("loss_scale", "initial_scale_power")
DYNAMIC_SCALING = ("loss_scale_window", "hysteresis", "min_scale")
"""Fields of the dynamic loss scale, which take effect with fp16 only."""
PIPELINE_FLAGS = {
    "pipeline_schedule": "--pipeline-schedule",
    "pipeline_auto_schedules": "--pipeline-auto-schedules",
    "pipeline_chunks": "--pipeline-chunks",
    "pipeline_placement": "--pipeline-placement",
    "pipeline_schedule_file": "--pipeline-schedule-file",
    "pipeline_layout": "--pipeline-model-parallel-layout",
    "layers_per_chunk": "--num-layers-per-virtual-pipeline-stage",
    "pipeline_trace": "--pipeline-trace",
    "check_data_agreement": "--check-data-agreement",
}
"""Fields that take effect in a pipeline only -> their flags."""
SAVED_INPUT_FLAGS = {
    "partition_activations": "--partition-activations",
    "checkpoint_in_cpu": "--checkpoint-in-cpu",
    "contiguous_checkpointing": "--contigious-checkpointing",
}
"""Fields that control where the inputs of recomputed layers are stored -> their flags."""
TRAINING_FIELDS = (
    "save_interval", "save_interval_minutes", "checkpoint_format", "async_save", "on_save_error",
    "export_hf_interval", "save_remote",
    "rampup_batch_size", "step_batch_size_schedule", "iterations_to_skip",
    "seq_length_schedule", "seq_length_curriculum", "num_workers", "prefetch_factor", "mixture_schedule",
    "layout_independent_dropout",
    "stability_guard", "stability_sigma", "stability_window", "stability_patience", "drift_interval",
)  # fmt: skip
"""Fields that take effect in training only. Prefetching is among them, because evaluation does not prefetch."""
TRAINING_ONLY = (
    *TRAINING_FIELDS, "pipeline_trace", *LOGGING_IN_TRAINING, "eval_tasks_interval", *DEBUG_IN_TRAINING, *DUMP_ONLY,
)  # fmt: skip
"""Fields that are rejected together with --eval-only, and fields that depend on them."""
ADAM = ("adam_beta1", "adam_beta2", "adam_eps")


def unused_flag_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each flag set by the user that has no effect."""
    explicit, optimizer = config.explicit_fields, config.optimizer
    yield from scaling_problems(config)
    if "wsd_decay_fraction" in explicit and optimizer.lr_decay_style != "wsd":
        yield (
            "--wsd-decay-fraction has no effect without --lr-decay-style wsd, got --lr-decay-style "
            f"{optimizer.lr_decay_style}. Remove it, or change the style"
        )
    if not (optimizer.optimizer == "adamw" or optimizer.is_muon):
        params = config.deepspeed.get("optimizer", {}).get("params", {})
        json_keys = [f"optimizer.params.{name}" for name in ("betas", "eps") if params.get(name, "auto") != "auto"]
        flags = [*_flags(config, ADAM), *json_keys]
        if flags:
            got = f"got --optimizer {optimizer.optimizer}"
            yield f"{', '.join(flags)} applies to AdamW only, {got}. Remove it, or use --optimizer adamw"
    yield from data_problems(config)
    model = config.model
    if model.layout_independent_dropout and not (model.attention_dropout or model.hidden_dropout):
        yield (
            "--layout-independent-dropout has no effect without dropout, got --attention-dropout 0 and "
            "--hidden-dropout 0. Remove it, or raise one of the two"
        )
    if model.layout_independent_dropout and config.parallel.compile:
        yield (
            "--compile does not support --layout-independent-dropout, whose masks are computed step by step to "
            "compare layouts. Remove one of them"
        )
    yield from format_problems(config)
    if config.checkpoint.eval_only and config.batch.eval_iters == 0:
        yield "--eval-only needs at least one evaluation step, got --eval-iters 0. Raise --eval-iters"
    flags = [flag for name, flag in PIPELINE_FLAGS.items() if name in explicit]
    if flags and not config.parallel.has_pipeline:
        yield (
            f"{', '.join(flags)} has no effect without a pipeline, got --pipe-parallel-size "
            f"{config.parallel.pipe_parallel_size}. Remove it, or use --pipe-parallel-size 2 or more"
        )
    has_steps = config.parallel.has_pipeline and "trace_steps" in config.deepspeed.get("pipeline", {})
    if has_steps and not config.parallel.pipeline_trace:
        yield "pipeline.trace_steps in the JSON has no effect without a trace. Add --pipeline-trace FOLDER"
    if config.checkpoint.eval_only and "pipeline_trace" in explicit:
        yield "--pipeline-trace records training steps only, got --eval-only. Remove one of them"
    flags = _flags(config, TRAINING_FIELDS) if config.checkpoint.eval_only else []
    if flags:
        yield f"{', '.join(flags)} applies to training only, got --eval-only. Remove one of them"


def format_problems(config: Config) -> Iterator[str]:
    """If --checkpoint-format is deepspeed, yield an error message for each setting that the format does not support."""
    if not config.checkpoint.is_deepspeed:
        return
    for name in ("async_save", "keep_every", "no_save_optim", "export_hf_interval", "save_remote"):
        if getattr(config.checkpoint, name):
            yield (
                f"--{name.replace('_', '-')} needs --checkpoint-format native, got deepspeed. Remove one of them; if "
                "the run folder has checkpoints in DeepSpeed's layout, also set --save to another folder"
            )
    by_name = (
        "lr_embedding",
        "lr_head",
        "decoupled_lr",
        "lr_by_name",
        "weight_decay_by_name",
        "apply_wd_to_qk_layernorm",
    )
    if flags := _flags(config, by_name):
        yield (
            "--checkpoint-format deepspeed stores optimizer states by index in groups with one learning rate, got "
            f"{', '.join(flags)}, which changes the groups. Use --checkpoint-format native, or remove it"
        )
    if config.optimizer.zero_stage:
        yield (
            "--checkpoint-format deepspeed stores unsharded optimizer states, got --zero-stage "
            f"{config.optimizer.zero_stage}, which shards them over the replicas. Use --zero-stage 0, or "
            "--checkpoint-format native"
        )
    if config.optimizer.quantized_states:
        quantized = " and ".join(f"--{name.replace('_', '-')}-dtype 8bit" for name in config.optimizer.quantized_states)
        yield (
            f"--checkpoint-format deepspeed stores states in the dtype of main params, got {quantized}. Use "
            "--checkpoint-format native, which stores them in fp32, or remove it"
        )
    if config.stability.stability_guard == "rollback":
        yield (
            "--stability-guard rollback needs checkpoints in the native format, got --checkpoint-format deepspeed. "
            "Use --stability-guard skip, or --checkpoint-format native"
        )


def saved_input_notes(config: Config) -> Iterator[str]:
    """Yield a note for settings of saved layer inputs, from the JSON or the defaults, that have no effect."""
    parallel = config.parallel
    flags = [
        flag
        for name, flag in SAVED_INPUT_FLAGS.items()
        if getattr(parallel, name) and name not in config.explicit_fields
    ]
    if flags and not parallel.checkpoint_activations:
        yield f"{', '.join(flags)} in the JSON or the defaults has no effect without --checkpoint-activations"
    elif SAVED_INPUT_FLAGS["partition_activations"] in flags and parallel.model_parallel_size == 1:
        yield "--partition-activations in the JSON or the defaults has no effect with one tensor rank"


def scaling_problems(config: Config) -> Iterator[str]:
    """Yield an error message if dynamic loss-scale flags are combined with a fixed scale."""
    fixed = config.precision.loss_scale
    names = _flags(config, ("initial_scale_power", *DYNAMIC_SCALING)) if fixed and _may_be_fp16(config) else []
    if names:
        yield (
            f"{', '.join(names)} applies to a dynamic loss scale only, got the fixed {_scale_text(config)}. Remove "
            "one of them"
        )


def notes(config: Config, world_size: int) -> Iterator[str]:
    """Yield a note for each setting that is accepted although it has no effect."""
    yield from scaling_notes(config)
    yield from saved_input_notes(config)
    yield from data_notes(config, world_size)
    parallel, json = config.parallel, config.deepspeed
    if "partition_method" in config.explicit_fields and not parallel.has_pipeline:
        yield f"--partition-method {parallel.partition_method} has no effect without a pipeline"
    defaults = [
        flag for name, flag in PIPELINE_FLAGS.items() if getattr(parallel, name) != getattr(ParallelConfig(), name)
    ]
    if defaults and not parallel.has_pipeline:
        yield f"{', '.join(defaults)} in the defaults has no effect without a pipeline"
    if parallel.gradient_accumulation_fusion and parallel.device == "cpu" and config.precision.dtype == "bf16":
        yield (
            "--gradient-accumulation-fusion has no effect in bf16 on a CPU, which cannot accumulate products of bf16 "
            "in fp32; it takes effect with --fp32"
        )
    if not parallel.has_pipeline:
        yield from _single_stage_notes(config)
    else:
        for name in json.get("pipeline", {}):
            if name in UNUSED_PIPELINE_KEYS:
                yield f"the JSON's pipeline.{name} has no effect: {UNUSED_PIPELINE_KEYS[name]}"
    if json.get("flops_profiler", {}).get("enabled", False) is True and parallel.has_pipeline:
        yield 'the JSON\'s "flops_profiler" has no effect with a pipeline; progress lines show FLOP/s'


def _single_stage_notes(config: Config) -> Iterator[str]:
    """Yield a note for each JSON key that has no effect without a pipeline."""
    json = config.deepspeed
    if json.get("pipeline"):
        yield 'the JSON\'s "pipeline" has no effect without a pipeline (--pipe-parallel-size 2 or more)'
    is_stated = json.get("steps_per_print", "auto") not in ("auto", LARGEST_INT)  # LARGEST_INT means never
    if is_stated and not (config.run.verbose_deepspeed or engine_features(json)):
        yield f'the JSON\'s "steps_per_print" has no effect: {PASSED_TO_ENGINE["steps_per_print"].without_pipeline}'
    if json.get("zero_allow_untested_optimizer") is False:
        about = PASSED_TO_ENGINE["zero_allow_untested_optimizer"].without_pipeline
        yield f'the JSON\'s "zero_allow_untested_optimizer" false has no effect: {about}'


def scaling_notes(config: Config) -> Iterator[str]:
    """Yield a note for loss-scale settings without effect: the format is not fp16, or the scale is fixed."""
    dtype, fixed = config.precision.dtype, "fp16.loss_scale"
    dynamic_keys = (
        [name for name in _stated_scaling(config.deepspeed) if name != fixed] if config.precision.loss_scale else []
    )
    if dynamic_keys and _may_be_fp16(config):
        yield f"{', '.join(dynamic_keys)} in the JSON has no effect with the fixed {_scale_text(config)}"
    unused = [*_flags(config, (*SCALING, *DYNAMIC_SCALING)), *_stated_scaling(config.deepspeed)]
    if unused and dtype not in (None, "fp16"):
        yield f"{', '.join(unused)} has no effect: only fp16 has a loss scale, and this run is {dtype}"


def _may_be_fp16(config: Config) -> bool:
    return config.precision.dtype in (None, "fp16")


def _scale_text(config: Config) -> str:
    name = "--loss-scale" if "loss_scale" in config.explicit_fields else "fp16.loss_scale of the JSON,"
    return f"{name} {config.precision.loss_scale:g}"


def _stated_scaling(json: Mapping[str, Any]) -> list[str]:
    section = json.get("fp16", {})
    if section.get("enabled") is False:  # a disabled section needs no note
        return []
    return [f"fp16.{name}" for name, key in FP16.items() if key.field and section.get(name, "auto") != "auto"]
