"""Table of the settings that may differ between the run that saved a checkpoint and the run that resumes from it.

A difference in a setting that must match is rejected (exit code 3) by the function that the row names. Other listed
differences are reported once by ``warn_of_changes``. Settings without a row may change.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron import device, log
from megatron.arguments.flag_values import family_options
from megatron.checkpoint import former
from megatron.config import Config, elastic
from megatron.config.decoder import REFITTED
from megatron.data.blend_resume import CONTENT, SAMPLES, TOKENIZER
from megatron.mpu.topology import Topology

MUST_MATCH, WARNED, MAY_CHANGE = "must match", "warned", "may change"


class Rule(NamedTuple):
    """A row of the table.

    Args:
        description: description of the settings.
        fields: the settings as "section.field".
        verdict: MUST, WARNED or MAY.
        meaning: effect of a change, and the flags that accept it.
        applies_to_weights: also applies if only the weights are loaded.
    """

    description: str
    fields: tuple[str, ...]
    verdict: str
    meaning: str
    applies_to_weights: bool = False


RULES = (
    Rule(
        "the model's sizes, biases, vocabulary, tied head and activation", (), MUST_MATCH,
        "the weights would not fit; every difference is listed (check_model)",
    ),
    Rule(
        "--rotary-base and all other rotary flags, --alibi-bias-max, windows, --softmax-scale, soft-caps, "
        "--scale-embeddings, --clip-qkv, --no-rope-freq, --qk-norm-order, --activation-func-clamp-value, "
        "--glu-linear-offset, --attention-value-scale, muP and MiniCPM's scalings (decoders), "
        "--relative-attention-max-distance (T5)",
        (*(f"model.{name}" for name in REFITTED), "t5.relative_attention_max_distance"), MUST_MATCH,
        "the same weights produce other outputs; --finetune uses the current values and warns (check_model)",
        applies_to_weights=True,
    ),
    Rule(
        "tokenizer", (), MUST_MATCH,
        "token ids would change their meaning; --allow-vocab-change accepts one of the same size (check_tokenizer)",
    ),
    Rule(
        "corpora, --split, lengths, --seed and --data-order (compared by fingerprint)", (), MUST_MATCH,
        "samples would be repeated or lost; --allow-data-change, --finetune (resume_order)",
    ),
    Rule(
        "--optimizer, --adaptive-muon-moment2-method", (), MUST_MATCH,
        "its moments would have another meaning; --no-load-optim, --load-weights-only, --finetune (check_fits)",
    ),
    Rule(
        "--train-iters, --train-samples, --train-tokens, --lr-decay-iters, --lr-decay-samples",
        ("batch.train_iters", "batch.train_samples", "batch.train_tokens", "optimizer.lr_decay_iters",
         "optimizer.lr_decay_samples"), WARNED,
        "the order of the samples is unchanged; the learning-rate decay follows the current flags. With --data-order "
        "megatron, another number of epochs changes the order and is rejected like another seed (resume_order)",
    ),
    Rule(
        "--batch-size, --gas, replicas, --rampup-batch-size, --step-batch-size-schedule",
        ("batch.batch_size", "batch.gas", "batch.requested_global_batch_size", "batch.rampup_batch_size",
         "batch.step_batch_size_schedule"), WARNED,
        "the position is stored in samples, so a run with any batch size continues with the next sample. "
        "A learning-rate schedule or run length in samples or tokens follows the samples",
    ),
    Rule(
        "--seq-length-schedule, --seq-length-curriculum",
        ("batch.seq_length_schedule", "batch.seq_length_curriculum"), WARNED,
        "the current schedule applies from the next step on; the samples and their order are unchanged",
    ),
    Rule(
        "--lr, --lr-embedding, --lr-head, --lr-by-name, --decoupled-lr, --decoupled-min-lr, --min-lr, "
        "--lr-decay-style, --warmup, --lr-warmup-rounding, --lr-warmup-init, --lr-step-offset, --wsd-decay-fraction, "
        "--weight-decay-incr-style, --start-weight-decay, --end-weight-decay, --lr-trained-tokens",
        ("optimizer.lr", "optimizer.lr_embedding", "optimizer.lr_head", "optimizer.lr_by_name",
         "optimizer.decoupled_lr", "optimizer.decoupled_min_lr", "optimizer.min_lr", "optimizer.lr_decay_style",
         "optimizer.warmup", "optimizer.lr_warmup_rounding", "optimizer.lr_step_offset", "optimizer.lr_warmup_iters",
         "optimizer.lr_warmup_init", "optimizer.weight_decay_incr_style", "optimizer.start_weight_decay",
         "optimizer.end_weight_decay", "optimizer.lr_trained_tokens",
         "optimizer.lr_warmup_samples", "optimizer.wsd_decay_fraction",
         "optimizer.lr_wsd_decay_iters", "optimizer.lr_wsd_decay_samples", "optimizer.lr_wsd_decay_style"), WARNED,
        "the current schedule applies from the checkpoint's number of updates (or their samples) on",
    ),
    Rule(
        "--weight-decay, --weight-decay-by-name, --apply-wd-to-qk-layernorm, --adam-*, --sgd-momentum, "
        "--muon-*, --adaptive-muon-beta2, --adaptive-muon-eps, --clip-grad, --z-loss, "
        "--qk-clip, --qk-clip-threshold, --qk-clip-alpha, --qk-clip-bound, --mtp-loss-scaling-factor, --loss-average",
        ("optimizer.weight_decay", "optimizer.weight_decay_by_name", "optimizer.apply_wd_to_qk_layernorm",
         "optimizer.adam_beta1", "optimizer.adam_beta2",
         "optimizer.adam_eps", "optimizer.clip_grad", "optimizer.muon_momentum", "optimizer.muon_nesterov",
         "optimizer.muon_num_ns_steps", "optimizer.muon_coefficient_type", "optimizer.muon_fp32_matmul_prec",
         "optimizer.adaptive_muon_beta2", "optimizer.adaptive_muon_eps", "optimizer.muon_scale_mode",
         "optimizer.muon_extra_scale_factor",
         "optimizer.muon_split_qkv", "optimizer.muon_split_qkv_heads", "optimizer.sgd_momentum", "model.z_loss",
         "model.mtp_loss_scaling_factor", "model.loss_average", "model.qk_clip", "model.qk_clip_threshold",
         "model.qk_clip_alpha", "model.qk_clip_bound"), WARNED,
        "applies from the next step on",
    ),
    Rule(
        "precision and loss scale",
        ("precision.dtype", "precision.loss_scale", "precision.loss_scale_window", "precision.hysteresis",
         "precision.min_scale", "optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype"), WARNED,
        "main params and moments are restored exactly (from fp64, and moments to bf16: rounded); a dynamic fp16 "
        "loss scale resumes in a run that has one, otherwise the loss scale starts as in a new run",
    ),
    Rule(
        "--fp8-format, --fp8-recipe, --first-last-layers-bf16, --num-layers-at-start-in-bf16, "
        "--num-layers-at-end-in-bf16",
        ("precision.fp8_format", "precision.fp8_recipe", "precision.first_last_layers_bf16",
         "precision.num_layers_at_start_in_bf16", "precision.num_layers_at_end_in_bf16"), WARNED,
        "products are rounded as the current flags state from the next step on; FP8 has no state in a checkpoint",
    ),
    Rule(
        "--seed, dropout", ("run.seed", "model.attention_dropout", "model.hidden_dropout",
         "model.layout_independent_dropout"), WARNED,
        "dropout masks differ from the next step on",
    ),
    Rule(
        "--layernorm-epsilon, --apply-residual-connection-post-layernorm",
        ("model.layernorm_epsilon", "model.apply_residual_connection_post_layernorm"), WARNED,
        "the same weights produce other outputs", applies_to_weights=True,
    ),
    Rule(
        "--compile, --fused-kernels, --gradient-accumulation-fusion, --cpu-adam, --loss-chunk-tokens",
        ("parallel.compile", "parallel.fused_kernels", "parallel.gradient_accumulation_fusion", "optimizer.cpu_adam",
         "model.loss_chunk_tokens"), WARNED,
        "other kernels round differently from the next step on",
    ),
    Rule(
        "--callback", ("run.callback",), WARNED,
        "each callback continues with its own state; the next save drops the state of a callback that is not named",
    ),
    Rule(
        "versions of torch, threads, CPU or GPU", (), WARNED,
        "bitwise identity with an uninterrupted run is not guaranteed (machine_properties)",
    ),
    Rule(
        "layout, schedule, recomputation, ZeRO stage, number of processes", (), MAY_CHANGE,
        "each rank reads the slices it needs; other reductions round differently; both layouts are logged",
    ),
    Rule("everything else: intervals, folders, logging, evaluation, guards", (), MAY_CHANGE, "applies from now on"),
)  # fmt: skip


DERIVED_FROM = {"train_iters": ("train_samples", "train_tokens"), "lr_decay_iters": ("lr_decay_samples",)}
"""Step count -> settings that determine it. If both runs set one of them, a changed step count is not reported."""


def changed_settings(saved: Mapping[str, Any], now: Config, rules: Iterable[Rule] = RULES) -> Iterator[str]:
    """Yield "lr: saved 0.1, now 0.2" for each setting in ``rules`` that differs; unsaved settings are ignored."""
    saved, current = former.convert_settings(saved), now.to_dict()
    for rule in rules:
        for name in rule.fields:
            section, field = name.split(".")
            old, new = saved.get(section, {}), current.get(section, {})
            if any(key in old and None not in (old[key], new[key]) for key in DERIVED_FROM.get(field, ())):
                continue
            if field in old and field in new and old[field] != new[field]:
                yield f"{field}: saved {old[field]}, now {new[field]}"


DATA_SETTINGS = {
    SAMPLES: (
        "data_order", "shuffle_window", "mid_level_dataset_surplus", "no_extra_token", "split", "split_by", "packing",
        "fim_rate",
        "fim_spm_rate", "chat_template", "sft_overlong", "seq_length", "seed", "enc_seq_length", "dec_seq_length",
        "noise_density", "mean_span_length", "denoisers", "mask_prob", "whole_word_masking", "short_seq_prob",
    ),
    TOKENIZER: ("tokenizer_type", "tokenizer_path", "vocab_file", "merge_file", "vocab_extra_ids"),
    CONTENT: (
        "data_path", "train_data_path", "valid_data_path", "test_data_path", "sft", "valid_sft", "json_key",
    ),
}  # fmt: skip
"""Part of a corpus's fingerprint -> the data settings that it depends on."""


def changed_data_settings(saved: Mapping[str, Any], now: Config) -> dict[str, list[str]]:
    """Describe changed data settings as "--split was 900,50,50, now 949,50,1", by fingerprint part.

    Args:
        saved: the settings in the checkpoint, from any version; missing settings are ignored.
    """
    old, new = _flatten(former.convert_settings(saved)), _flatten(now.to_dict())
    flags = {option.name: option.flag for option in family_options(now.family)}
    return {
        fingerprint_part: [
            f"{flags[name]} was {_format_value(old[name])}, now {_format_value(new[name])}"
            for name in names
            if flags.get(name) and name in old and name in new and old[name] != new[name]
        ]
        for fingerprint_part, names in DATA_SETTINGS.items()
    }


def _flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    sections = {name: values for name, values in settings.items() if name not in ("deepspeed", "extra")}
    return {
        name: value for values in sections.values() if isinstance(values, Mapping) for name, value in values.items()
    }


def _format_value(value: object) -> str:
    return "not set" if value is None else str(value)


def warn_of_changes(metadata: Mapping[str, Any], now: Config, device_type: str) -> None:
    """Warn about settings and machine properties that differ from the checkpoint's. Called on rank 0."""
    changed_texts = list(changed_settings(metadata.get("config", {}), now))
    # In an elastic job, the number of micro-batches is derived from the number of replicas.
    if elastic.parse_rank_range(os.environ):
        changed_texts = [
            text for text in changed_texts if not text.startswith(("gas:", "requested_global_batch_size:"))
        ]
    if changed_texts:
        log.warning(f"settings differ from the checkpoint: {'; '.join(changed_texts)}")
    current_machine = machine_properties(device_type)
    saved_machine = {"torch": metadata.get("torch"), **metadata.get("machine", {})}
    machine_changes = [
        f"{name}: saved {saved_machine[name]}, now {current_machine[name]}"
        for name in current_machine
        if saved_machine.get(name) not in (None, current_machine[name])
    ]
    if machine_changes:
        log.warning(
            f"the machine differs from the checkpoint's ({'; '.join(machine_changes)}): bitwise identity with an "
            "uninterrupted run is not guaranteed"
        )


def warn_of_weights(saved: Mapping[str, Any], now: Config, source: Path, advice: str = "") -> None:
    """Warn about changed settings that affect a model's outputs with the weights from ``source``.

    Called on rank 0 if a start loads only weights; ``saved`` are the settings of the run that saved them.
    """
    changed = list(changed_settings(saved, now, [rule for rule in RULES if rule.applies_to_weights]))
    if changed:
        log.warning(
            f"the weights of {source} produce other outputs with the current settings: {'; '.join(changed)}{advice}"
        )


def machine_properties(device_type: str) -> dict[str, Any]:
    """Return machine and torch properties that affect the last bits of a loss."""
    properties: dict[str, Any] = {"torch": torch.__version__, "cpu": _cpu_model(), "threads": torch.get_num_threads()}
    return properties | ({"gpu": device.name(device_type)} if device_type != "cpu" else {})


def layout_text(saved: Mapping[str, int], now: Topology) -> str | None:
    """Format "saved tp2 pp2 dp1, now tp1 pp4 dp1", or return None if the layouts are the same."""
    context = saved.get("context", 1)  # older checkpoints do not have it
    old = Topology(pipe=saved["pipe"], data=saved["data"], tensor=saved["tensor"], context=context)
    return None if old == now else f"saved {_format_layout(old)}, now {_format_layout(now)}"


def _format_layout(topology: Topology) -> str:
    context = f" cp{topology.context}" if topology.context > 1 else ""
    return f"tp{topology.tensor} pp{topology.pipe} dp{topology.data}{context}"


def _cpu_model() -> str:
    """Return this machine's CPU model and the instruction set that torch uses."""
    name = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"
