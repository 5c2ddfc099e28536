"""Convert other trainers' flags exactly to our units, and resolve settings that depend on several flags.

``set_converted_fields`` needs flags only and runs before the JSON and the defaults are read; ``resolve_lengths`` and
``resolve_dependent_settings`` run after all sizes are known.

| flags of other trainers | conversion |
|---|---|
| --train-samples N | steps while they fit into N samples; a last step that would exceed N is not taken |
| --train-tokens N | steps until N tokens are consumed; of several limits the first one ends the run |
| warm-up and decay in samples and tokens | the learning rate follows the samples, so that nothing is rounded |
| --train-tokens as the only length | the learning rate follows the samples; the decay ends with the tokens |
| warm-up and decay in steps | the learning rate follows the steps |
| --eval-global-batch-size N | as many steps of an evaluation as have the same samples |

Source: Megatron-LM, training.py, ``update_train_iters`` and ``get_optimizer_param_scheduler``; Megatron-DeepSpeed,
training.py, ``train``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any

from megatron.arguments.deepspeed_experts import convert_deepspeed_experts
from megatron.arguments.derived_sizes import GLOBAL_BATCH_FIELD
from megatron.arguments.foreign_flags import DENSE_ONLY, ForeignFlag, Target, foreign_flags
from megatron.arguments.related_fields import LENGTHS
from megatron.arguments.scan import Scan
from megatron.arguments.unused_flags import TRAINING_ONLY
from megatron.arguments.weighted_paths import paths_of_file, paths_of_json, weighted_paths, with_weights
from megatron.config.batch import BatchConfig
from megatron.config.batch_rampup import BatchSizes, parse_rampup, parse_schedule
from megatron.config.curriculum import NAME as CURRICULUM_NAME
from megatron.config.curriculum import curriculum_phases
from megatron.config.data import MOCK_DATA, SPLIT_PATH_FIELDS, TOKENIZERS
from megatron.config.logging import DEFAULT_PROFILE_STEPS
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.seq_length import SeqLengths
from megatron.errors import ConfigError
from megatron.models.registry import FAMILIES

SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""--data-parallel-sharding-strategy -> ZeRO stage."""


def set_converted_fields(scanned: Scan) -> None:
    """Set the fields that depend on converted flags only; problems are added to ``scanned.problems``."""
    for flag, value in scanned.converted.items():
        spelling = flag if value is True else f"{flag} {value}"
        for target in foreign_flags()[flag].targets:
            if target.function:
                if convert := CONVERSIONS.get(target.function):
                    convert(scanned, value, spelling)
            elif target.choices:
                _set_choice(scanned, foreign_flags()[flag], target, value)
            elif target.is_fallback:
                scanned.values.setdefault(target.fields[0], _parse_constant(target))
            else:
                scanned.set(target.fields[0], _parse_constant(target) if target.value else value, spelling)
    convert_deepspeed_experts(scanned)
    _set_zero_stage(scanned)
    _set_profile_steps(scanned)
    _set_paths(scanned)


def _parse_constant(target: Target) -> Any:
    """Convert a target's constant to True or a number if possible, otherwise keep the text."""
    if target.value == "True":
        return True
    for convert in (int, float):
        try:
            return convert(target.value)
        except ValueError:
            continue
    return target.value


def _set_choice(scanned: Scan, row: ForeignFlag, target: Target, value: str) -> None:
    if value in target.choices:
        scanned.set(target.fields[0], target.choices[value], f"{row.flag} {value}")
    else:
        advice = f"; {row.alternative}" if row.alternative else ""
        scanned.problems.append(f"{row.flag} must be one of {', '.join(target.choices)}, got {value!r}{advice}")


# Conversions of a single flag, named by the targets of the table: (scan, value of the flag, "--flag value" as typed).


def _convert_minutes(scanned: Scan, value: float, spelling: str) -> None:
    scanned.set("exit_duration_in_mins", value / 60, spelling)


def _convert_seconds(scanned: Scan, value: float, spelling: str) -> None:
    scanned.set("step_timeout", max(round(60 * value), 1), spelling)


def _convert_vocab_rows(scanned: Scan, value: int, spelling: str) -> None:
    scanned.values["vocab_size"] = max(value, scanned.values.get("vocab_size") or 0)
    scanned.spelling["vocab_size"] = spelling


def _convert_linear_scaling(scanned: Scan, value: float, spelling: str) -> None:
    scanned.set("rotary_scaling", "linear", spelling)
    scanned.set("rotary_scaling_factor", value, spelling)


def _convert_remote_device(scanned: Scan, value: str, spelling: str) -> None:
    if value == "none":
        scanned.ignored[spelling] = "weights are on the device"
    elif value == "cpu":
        scanned.set("offload_parameters", True, spelling)
    else:
        scanned.problems.append(
            f"--remote-device must be none or cpu, got {value!r}. Use cpu with --zero-stage 3, or remove it"
        )


def _convert_recompute_method(scanned: Scan, value: str, spelling: str) -> None:
    if "--activations-checkpoint-granularity" in scanned.converted:
        return
    if value in ("uniform", "block"):
        scanned.set("checkpoint_activations", True, spelling)
    else:
        scanned.problems.append(f"--activations-checkpoint-method must be one of uniform, block, got {value!r}")


def _convert_attention_config(scanned: Scan, value: list[str], spelling: str) -> None:
    """Ignore attention types that select a kernel; any other type is a problem."""
    text = " ".join(value)
    if unsupported := set(re.findall(r"[a-z_]+", text)) - {"global", "flash", "all"}:
        scanned.problems.append(f"--attention-config must be global or flash, got {', '.join(sorted(unsupported))}")
    else:
        scanned.ignored["--attention-config"] = "scaled_dot_product_attention selects the kernel of all layers"


def _convert_head_type(scanned: Scan, value: str, spelling: str) -> None:
    if value == "multiquery":
        scanned.values.setdefault("num_query_groups", 1)
    elif value == "multihead":
        scanned.ignored[spelling] = "every attention head has its own keys and values by default"
    else:
        scanned.problems.append(f"--attention-head-type must be one of multihead, multiquery, got {value!r}")


def _convert_ulysses(scanned: Scan, value: int, spelling: str) -> None:
    if value == 1:
        scanned.ignored[spelling] = "sequences are not split"
        return
    scanned.set("context_parallel_size", value, spelling)
    scanned.set("cp_comm_type", "a2a", spelling)


def _convert_scale_power(scanned: Scan, value: float, spelling: str) -> None:
    power = math.log2(value) if value > 0 else -1.0
    if power >= 0 and power == int(power):
        scanned.set("initial_scale_power", int(power), spelling)


CONVERSIONS: Mapping[str, Callable[[Scan, Any, str], None]] = {
    "minutes": _convert_minutes,
    "seconds": _convert_seconds,
    "scale_power": _convert_scale_power,
    "vocab_rows": _convert_vocab_rows,
    "linear_scaling": _convert_linear_scaling,
    "remote_device": _convert_remote_device,
    "recompute_method": _convert_recompute_method,
    "ulysses": _convert_ulysses,
    "head_type": _convert_head_type,
    "attention_config": _convert_attention_config,
}
DEFERRED_CONVERSIONS = (
    "zero_stage", "profile_steps", "paths", "lengths", "skip_train", "gelu", "mup", "no_pipeline", "unique_layers",
    "require_checkpoint", "checkpoint_schedule", "linear_biases", "norm_bias", "deepspeed_experts", "eval_batch",
    "accounted_layout", "fpdt", "curriculum",
)  # fmt: skip
"""Conversions that depend on other flags or on sizes. They are defined below, except for ``require_checkpoint`` in
``other_programs``, ``checkpoint_schedule`` in ``checkpoint.checkpoint_args``, ``deepspeed_experts``, and
``accounted_layout`` in ``derived_sizes``.
"""
OPTIMIZER_FLAGS = {"muon": ("muon", "adaptive_muon"), "adaptive_muon": ("adaptive_muon",), "sgd": ("sgd",)}
"""Prefix of optimizer settings -> the optimizers that use them."""
CHECKPOINT_SCHEDULE = tuple(
    f"--use-checkpoint-{name}" for name in ("lr-scheduler", "opt-param-scheduler", "opt_param-scheduler")
)


def _set_zero_stage(scanned: Scan) -> None:
    """Set the ZeRO stage that FSDP or the distributed optimizer implies, unless a stage is given."""
    converted, stage, origin = scanned.converted, 0, ""
    strategy = converted.get("--data-parallel-sharding-strategy")
    if "--use-torch-fsdp2" in converted:
        stage, origin = 3, "--use-torch-fsdp2"
    elif "--use-megatron-fsdp" in converted and strategy is not None:
        stage, origin = SHARDING.get(strategy, -1), f"--data-parallel-sharding-strategy {strategy}"
        if stage < 0:
            scanned.problems.append(
                f"--data-parallel-sharding-strategy must be one of {', '.join(SHARDING)}, got {strategy!r}"
            )
    elif strategy is not None:
        scanned.ignored["--data-parallel-sharding-strategy"] = "it needs --use-megatron-fsdp"
    if stage == 0 and "--use-distributed-optimizer" in converted:
        stage, origin = 1, "--use-distributed-optimizer"
    if stage > 0 and "zero_stage" not in scanned.values:
        scanned.set("zero_stage", stage, origin)
    elif "--use-distributed-optimizer" in converted and origin != "--use-distributed-optimizer":
        scanned.ignored["--use-distributed-optimizer"] = "another flag sets the ZeRO stage"


def _set_profile_steps(scanned: Scan) -> None:
    """Set the steps to profile: START + 1 to END, as in Megatron."""
    first, last = "--profile-step-start", "--profile-step-end"
    flags = [flag for flag in (first, last) if flag in scanned.converted]
    if not flags:
        return
    if "profile" not in scanned.values:
        scanned.ignored |= dict.fromkeys(flags, "it needs --profile")
        return
    start, end = scanned.converted.get(first, 10), scanned.converted.get(last, 12)
    steps = f"{start + 1}-{end}"
    if scanned.values["profile"] not in (DEFAULT_PROFILE_STEPS, steps):
        scanned.problems.append(
            f"{' and '.join(flags)} must agree with --profile, got the steps {steps} and {scanned.values['profile']}. "
            "Remove one of them"
        )
    scanned.values["profile"], scanned.spelling["profile"] = steps, f"--profile {steps}"


def _set_paths(scanned: Scan) -> None:
    """Set the corpora named by path files and by weighted split paths, and check them for --data-order megatron."""
    converted = scanned.converted
    for field in ("data_path", *SPLIT_PATH_FIELDS):
        if isinstance(text := scanned.values.get(field), str):
            scanned.values[field] = with_weights(text, scanned.notes)
            if scanned.values[field] != text and scanned.values.get("data_order") == "megatron":
                scanned.problems.append(
                    f"--data-order megatron needs a weight before each path, got --{field.replace('_', '-')} {text}: "
                    "without weights, Megatron reads each corpus once at most. Add the weights, or use --data-order "
                    "native"
                )
    if loader := converted.get("--dataloader-type"):
        if loader != "single" and scanned.values.get("data_order") == "megatron":
            scanned.problems.append(
                f"--data-order megatron reads samples as --dataloader-type single does, got {loader}. Remove "
                "--dataloader-type, or use --data-order native"
            )
        scanned.ignored["--dataloader-type"] = "the sample order follows from --data-order and --seed"
    try:
        if path := converted.get("--data-args-path"):
            scanned.set("data_path", paths_of_file(path), f"--data-args-path {path}")
        if path := converted.get("--per-split-data-args-path"):
            for field, text in paths_of_json(path).items():
                scanned.set(field, text, f"--per-split-data-args-path {path}")
        for field, text in weighted_paths(converted).items():
            if field == "split":  # the weighted paths also override --split in the original program
                scanned.values["split"] = text
            else:
                scanned.set(field, text, "--train-weighted-split-paths")
    except ConfigError as error:
        scanned.problems.append(str(error))


# --skip-train, which Megatron's scripts add to the flags of a training run.

STEP_COUNT_FIELDS = ("train_iters", *(name for names in LENGTHS for name in names))
"""Fields that contain a number of training steps."""


def convert_skip_train(scanned: Scan, defaults: Mapping[str, Any]) -> tuple[str, ...]:
    """Convert --skip-train to --eval-only if a checkpoint is loaded, otherwise to --train-iters 0.

    Flags of ``scanned`` that only training uses become ignored flags: the script passes them for its other runs.

    Returns:
        The fields that only training uses, whose defaults must be dropped; () without --skip-train.
    """
    if "--skip-train" not in scanned.converted:
        return ()
    merged = {**defaults, **scanned.values}
    if merged.get("load") or merged.get("resume"):
        scanned.values["eval_only"], scanned.spelling["eval_only"] = True, "--skip-train"
        unused: tuple[str, ...] = TRAINING_ONLY
    else:
        unused = (*TRAINING_ONLY, *STEP_COUNT_FIELDS)
        for flag in [flag for flag in LENGTH_FLAGS if scanned.converted.pop(flag, None) is not None]:
            scanned.ignored[flag] = "no step is trained with --skip-train"
    for name in unused:
        if scanned.values.pop(name, None) is not None:
            scanned.ignored[scanned.spelling.pop(name)] = "no step is trained with --skip-train"
    if "eval_only" not in scanned.values:
        scanned.values["train_iters"], scanned.spelling["train_iters"] = 0, "--skip-train"
    return unused


# Lengths: --train-samples, --train-tokens, and warm-up and decay in samples and tokens.

SAMPLE_LENGTH_FIELDS = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
LENGTH_FLAGS = ("--train-samples", "--train-tokens", "--lr-decay-tokens", "--lr-warmup-tokens")


def resolve_lengths(scanned: Scan, values: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Set the lengths of the run and of its evaluations in steps, and the schedule lengths, in ``values``.

    Args:
        values: field -> value, including defaults.

    Returns:
        Fields of ``BatchConfig`` without a flag: the run limits in samples and tokens.
    """
    _set_eval_iters(scanned, values, world_size)
    length_flags = {flag: scanned.converted[flag] for flag in LENGTH_FLAGS if flag in scanned.converted}
    is_by_tokens = length_flags.keys() & {"--train-samples", "--train-tokens"} == {"--train-tokens"}
    is_by_tokens = is_by_tokens and "train_iters" not in scanned.values
    is_exact = is_by_tokens and values.get("train_tokens_lr_unit", OptimizerConfig().train_tokens_lr_unit) == "samples"
    lengths_in_samples = [
        name for name in SAMPLE_LENGTH_FIELDS if "wsd" not in name or values.get("lr_decay_style") == "wsd"
    ]
    is_by_samples = bool(length_flags.keys() - {"--train-tokens"}) or any(
        values.get(name) is not None for name in lengths_in_samples
    )
    is_by_samples = is_by_samples or (is_exact and "lr_decay_iters" not in scanned.values)
    has_decay = "--lr-decay-tokens" in length_flags or scanned.values.keys() & {"lr_decay_iters", "lr_decay_samples"}
    if "train_tokens_lr_unit" in scanned.values and (has_decay or not is_by_tokens):
        scanned.ignored[scanned.spelling["train_tokens_lr_unit"]] = (
            "it needs --train-tokens as the only length of the run and of the decay"
        )
    if not length_flags and not is_by_samples:
        return {}
    batch_sizes, lengths = _batch_sizes(values, world_size), _seq_lengths(values)
    if batch_sizes is None or lengths is None:  # reported by the checks of the layout and of the curriculum
        return {}
    converts_warmup = lengths.truncates and _count_trained_tokens(
        scanned, values, length_flags, decays_with_run=is_exact and not has_decay
    )
    tokens_per_sample = Fraction(_tokens_per_sample(values, scanned.family))
    limits = {
        flag[2:].replace("-", "_"): length_flags[flag]
        for flag in ("--train-samples", "--train-tokens")
        if flag in length_flags
    }
    if "train_iters" in scanned.values and limits.keys() == {"train_tokens"}:
        limits["requested_train_iters"] = scanned.values["train_iters"]
    steps = _set_train_iters(scanned, values, length_flags, batch_sizes, lengths, tokens_per_sample)
    if is_by_samples:
        samples = Fraction(length_flags.get("--train-samples", batch_sizes.consumed_after(steps)))
        _set_lengths_in_samples(
            scanned,
            values,
            length_flags,
            batch_sizes,
            lengths,
            tokens_per_sample,
            length_flags["--train-tokens"] / tokens_per_sample if is_exact else samples,
            converts_warmup=converts_warmup,
        )
    return limits


def _set_eval_iters(scanned: Scan, values: dict[str, Any], world_size: int) -> None:
    """Convert the steps of evaluations from --eval-global-batch-size to the global batch size of the training."""
    flag = "--eval-global-batch-size"
    batch_sizes = _batch_sizes(values, world_size) if flag in scanned.converted else None
    if batch_sizes is None:
        return
    size, full = scanned.converted[flag], batch_sizes.full
    steps = values.get("eval_iters", BatchConfig().eval_iters)
    if size == full:
        scanned.ignored[f"{flag} {size}"] = "it is the global batch size"
    elif size < 1 or steps * size % full:
        scanned.problems.append(
            f"--eval-iters x {flag} must be a multiple of the global batch size, which evaluations use, got {steps} x "
            f"{size} = {steps * size} and {full}. Change --eval-iters, or remove {flag}"
        )
    else:
        values["eval_iters"] = steps * size // full


def _tokens_per_sample(values: Mapping[str, Any], family: str) -> int:
    """Count tokens per sample as --train-tokens does: the encoder's input, or the whole sample."""
    family_config = FAMILIES[family].config
    defaults: dict[str, Any] = {field.name: field.default for field in fields(family_config)} | dict(
        family_config.DEFAULTS
    )
    for name in ("enc_seq_length", "seq_length"):
        if length := values.get(name) or defaults.get(name):
            return int(length)
    return BatchConfig().seq_length


def _batch_sizes(values: Mapping[str, Any], world_size: int) -> BatchSizes | None:
    defaults = BatchConfig()
    t, p = values.get("model_parallel_size", 1), max(values.get("pipe_parallel_size", 1), 1)
    ranks = t * p * values.get("context_parallel_size", 1)
    if ranks < 1 or world_size % ranks:
        return None
    micro, gas = values.get("batch_size", defaults.batch_size), values.get("gas", defaults.gas)
    batch = BatchConfig(batch_size=micro, gas=gas, requested_global_batch_size=values.get(GLOBAL_BATCH_FIELD) or 0)
    full = batch.global_batch_size(world_size // ranks)
    text, schedule = values.get("rampup_batch_size"), values.get("step_batch_size_schedule")
    try:
        if schedule is not None:
            return parse_schedule(schedule, full, values.get("seq_length", defaults.seq_length))
        return BatchSizes(full) if text is None else parse_rampup(text, full)
    except ValueError:
        return None


def _seq_lengths(values: Mapping[str, Any]) -> SeqLengths | None:
    """Return the lengths of --seq-length-curriculum, or the full length; None if the curriculum is invalid."""
    full, text = values.get("seq_length", BatchConfig().seq_length), values.get("seq_length_curriculum")
    try:
        return SeqLengths(full, curriculum=() if text is None else curriculum_phases(text))
    except ValueError:
        return None


def _count_trained_tokens(
    scanned: Scan, values: dict[str, Any], length_flags: Mapping[str, int], *, decays_with_run: bool
) -> bool:
    """Let a learning-rate schedule in tokens count the tokens after truncation, as in Megatron-DeepSpeed.

    Args:
        decays_with_run: the decay ends with --train-tokens, the only length of the run.

    Returns:
        True if the warm-up has a length in steps or samples, which must be converted.
    """
    if "--lr-decay-tokens" not in length_flags and not decays_with_run:
        if "--lr-warmup-tokens" in length_flags:
            scanned.problems.append(
                f"--lr-warmup-tokens with {CURRICULUM_NAME} needs a decay in tokens, because a sample has fewer tokens "
                "at the start, got none. Add --lr-decay-tokens, or use --lr-warmup-samples"
            )
        return False
    names = ("lr_wsd_decay_iters", "lr_wsd_decay_samples") if values.get("lr_decay_style") == "wsd" else ()
    for name in names:
        if values.get(name) is not None:
            scanned.problems.append(
                f"{scanned.spelling.get(name, name)} with {CURRICULUM_NAME} and a decay in tokens has another unit. "
                "Use --wsd-decay-fraction"
            )
    warmup = [values.get("lr_warmup_iters"), values.get("lr_warmup_samples")]
    counts_samples = "--lr-warmup-tokens" not in length_flags and any(warmup)
    if values.get("lr_trained_tokens") == "decay" and counts_samples:  # from config.json, already converted
        return False
    values["lr_trained_tokens"] = "decay" if counts_samples else "all"
    return counts_samples


def _set_train_iters(
    scanned: Scan,
    values: dict[str, Any],
    length_flags: Mapping[str, int],
    batch_sizes: BatchSizes,
    lengths: SeqLengths,
    tokens_per_sample: Fraction,
) -> int:
    """Set ``train_iters``, and return the step count before the limit by --train-tokens is applied."""
    explicit, samples, limit = (
        scanned.values.get("train_iters"),
        length_flags.get("--train-samples"),
        length_flags.get("--train-tokens"),
    )
    steps = explicit
    if samples is not None:
        has_schedule = values.get("step_batch_size_schedule") is not None
        steps = batch_sizes.steps_until(samples) if has_schedule else batch_sizes.steps_within(samples)
        first = batch_sizes.at(0)
        if samples and not steps:
            scanned.problems.append(
                f"--train-samples must be enough for one step, got {samples} samples and {first} in the first step. "
                "Raise it"
            )
        if explicit not in (None, steps):
            scanned.problems.append(
                f"--train-iters and --train-samples must agree, got {explicit} steps and {samples} samples, which are "
                f"{steps} steps of {batch_sizes.full}. Remove one of them"
            )
    last = steps
    if limit is not None:
        by_tokens = batch_sizes.steps_until(limit / tokens_per_sample)
        if lengths.truncates:
            by_tokens = lengths.steps_until(limit, batch_sizes)
        last = by_tokens if steps is None else min(steps, by_tokens)
    if last is not None:
        values["train_iters"] = last
        scanned.values["train_iters"] = last
    return values.get("train_iters", BatchConfig().train_iters) if steps is None else steps


def _set_lengths_in_samples(
    scanned: Scan,
    values: dict[str, Any],
    length_flags: Mapping[str, int],
    batch_sizes: BatchSizes,
    lengths: SeqLengths,
    tokens_per_sample: Fraction,
    run_samples: Fraction,
    *,
    converts_warmup: bool,
) -> None:
    """Set the decay and warm-up lengths in samples, and the step at which the decay ends.

    A decay or warm-up of N steps is converted to the samples in the run's first N steps, and ``lr_wsd_decay_iters`` to
    the samples in the decay's last N steps. Steps of a batch ramp-up have fewer samples.

    Args:
        run_samples: samples of the run without the limit by --train-tokens.
        converts_warmup: the warm-up has a length in steps or samples, and the decay counts the tokens that
            --seq-length-curriculum leaves. The warm-up ends after the tokens of its samples.
    """
    decay = _length_in_samples(scanned, "decay", length_flags.get("--lr-decay-tokens"), batch_sizes, tokens_per_sample)
    decay = run_samples if decay is None else decay
    warmup = _length_in_samples(
        scanned, "warmup", length_flags.get("--lr-warmup-tokens"), batch_sizes, tokens_per_sample
    )
    if warmup is None and values.get("lr_warmup_samples") is not None:  # from the defaults
        warmup = Fraction(values["lr_warmup_samples"])
    if warmup is None and values.get("lr_warmup_iters") is not None:
        warmup = Fraction(batch_sizes.consumed_after(values["lr_warmup_iters"]))
    values["lr_decay_samples"] = _to_number(decay)
    if warmup is not None and converts_warmup:
        warmup = lengths.tokens_of(round(warmup), batch_sizes) / tokens_per_sample
    decay_steps = batch_sizes.steps_until(decay)
    if values.get("lr_trained_tokens", "none") != "none" and lengths.truncates:
        decay_steps = lengths.steps_until(math.ceil(decay * tokens_per_sample), batch_sizes)
    values["lr_decay_iters"] = max(decay_steps, 1)
    if warmup is not None:
        values["lr_warmup_samples"] = _to_number(warmup)
        values["lr_warmup_iters"] = None
    steps, last = values.get("lr_wsd_decay_iters"), batch_sizes.steps_until(decay)
    if steps is not None:
        before = batch_sizes.consumed_after(last - steps) if steps <= last else 0
        converted, samples = (
            batch_sizes.consumed_after(max(last, steps)) - before,
            scanned.values.get("lr_wsd_decay_samples"),
        )
        if samples not in (None, converted):
            scanned.problems.append(
                f"--lr-wsd-decay-iters and --lr-wsd-decay-samples must agree, got {steps} steps, which are the last "
                f"{converted:g} samples of the decay, and {samples:g} samples. Remove one of them"
            )
        values["lr_wsd_decay_samples"] = converted
        values["lr_wsd_decay_iters"] = None


def _length_in_samples(
    scanned: Scan, name: str, in_tokens: int | None, batch_sizes: BatchSizes, tokens_per_sample: Fraction
) -> Fraction | None:
    """Compute the decay or warm-up length in samples; None if no flag sets it.

    A length in tokens overrides one in samples, as in Megatron-DeepSpeed. If steps and samples are both given, they
    must be the same length.

    Args:
        name: "decay" or "warmup".
        in_tokens: length in tokens, or None.
        tokens_per_sample: tokens per sample.
    """
    steps, samples = scanned.values.get(f"lr_{name}_iters"), scanned.values.get(f"lr_{name}_samples")
    if in_tokens is not None:
        overridden = scanned.spelling.get(f"lr_{name}_samples") or scanned.spelling.get(f"lr_{name}_iters")
        if overridden:
            scanned.ignored[overridden] = f"--lr-{name}-tokens overrides it"
        return in_tokens / tokens_per_sample
    if steps is not None and samples is not None and batch_sizes.consumed_after(steps) != samples:
        scanned.problems.append(
            f"--lr-{name}-iters and --lr-{name}-samples must agree, got {steps} steps, which are "
            f"{batch_sizes.consumed_after(steps)} samples, and {_to_number(Fraction(samples))} samples. Remove one of "
            "them"
        )
    if samples is not None:
        return Fraction(samples)
    return None if steps is None else Fraction(batch_sizes.consumed_after(steps))


def _to_number(length: Fraction) -> float | int:
    return int(length) if length.denominator == 1 else float(length)


# Settings that follow from several others, once all of them are known.

TOKEN_FILE_FIELDS = (
    "split", "split_by", "data_impl", "data_cache_path", "object_storage_cache_path", "object_storage_cache_gb",
)  # fmt: skip
"""Fields that take effect only if token files are read."""
RECOMPUTE_FIELDS = ("checkpoint_num_layers", "partition_activations", "checkpoint_in_cpu", "contiguous_checkpointing")
"""Fields that take effect only if full layers are recomputed."""
SCALING = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_scale")
"""Fields that take effect with fp16 only."""


def resolve_dependent_settings(scanned: Scan, values: dict[str, Any], family: str) -> None:
    """Resolve settings that depend on others: change ``values``, and add unused flags to ``scanned.ignored``."""
    converted, t = scanned.converted, values.get("model_parallel_size", 1)
    if "--curriculum-learning-legacy" in converted and values.get("seq_length_curriculum") is None:
        scanned.problems.append(
            "--curriculum-learning-legacy needs an enabled section curriculum_learning in the JSON of "
            "--deepspeed_config, got none. Add it, use --seq-length-curriculum, or remove the flag"
        )
    if "--swiglu" in converted and "ff_hidden_size" not in values and "hidden_size" in values:
        values["ff_hidden_size"] = int(4 * values["hidden_size"] * 2 / 3) // 64 * 64 or 64
    _set_gelu(scanned, values)
    _ignore_fpdt(scanned, values)
    _set_linear_biases(scanned, values)
    _set_norm_bias(scanned, values, family)
    _apply_mup(scanned, values, family)
    _reject_dense_only(scanned, values)
    _reject_latent_head_norm(scanned, values)
    if scanned.values.get("add_qkv_bias") and values.get("hidden_bias"):
        values["add_qkv_bias"] = False
        scanned.ignored["--add-qkv-bias"] = "all linear layers have biases"
    for name, cause in (
        ("sequence_parallel", "there is only one tensor rank"),
        ("partition_activations", "there is only one tensor rank"),
    ):
        if name in scanned.values and values.get(name) and t == 1:
            values[name] = False
            scanned.ignored[scanned.spelling[name]] = cause
    recomputes = values.get("checkpoint_activations") or values.get("recompute_granularity") == "full"
    for name in RECOMPUTE_FIELDS if not recomputes else ():
        if name in scanned.values and scanned.spelling[name] not in scanned.ignored:
            del values[name], scanned.values[name]
            scanned.ignored[scanned.spelling[name]] = "no layers are recomputed"
    if values.get("dtype") not in (None, "fp16"):
        if "--initial-loss-scale" in converted and "initial_scale_power" not in scanned.values:
            scanned.ignored[f"--initial-loss-scale {converted['--initial-loss-scale']}"] = (
                f"only fp16 has a loss scale, and this run is {values['dtype']}"
            )
        for name in SCALING:
            if name in scanned.values:
                values.pop(name, None)
                del scanned.values[name]
                scanned.ignored[scanned.spelling[name]] = (
                    f"only fp16 has a loss scale, and this run is {values['dtype']}"
                )
    elif "--initial-loss-scale" in converted and "initial_scale_power" not in scanned.values:
        scale = converted["--initial-loss-scale"]
        scanned.problems.append(f"--initial-loss-scale must be a power of 2, got {scale:g}. Use --initial-scale-power")
    for name, is_unused, reason in (
        ("moe_router_pre_softmax", values.get("moe_router_score_function") == "sigmoid", "the router uses sigmoid"),
        ("rotary_scaling_factor", values.get("rotary_scaling", "none") == "none", "there is no --rotary-scaling"),
        ("no_load_optim", not (values.get("load") or values.get("resume")), "no checkpoint is loaded"),
        ("no_load_rng", not (values.get("load") or values.get("resume")), "no checkpoint is loaded"),
    ):
        if name in scanned.values and is_unused:
            values.pop(name, None)
            del scanned.values[name]
            scanned.ignored[scanned.spelling[name]] = reason
    _resolve_tokenizer_type(scanned, values)
    for flag in CHECKPOINT_SCHEDULE if "load" not in values and "resume" not in values else ():
        if flag in converted:
            scanned.ignored[flag] = "no checkpoint is loaded"
    for prefix, optimizers in OPTIMIZER_FLAGS.items():
        if values.get("optimizer") in optimizers:
            continue
        for name in [name for name in scanned.values if name.startswith(f"{prefix}_")]:
            values.pop(name, None)
            del scanned.values[name]
            scanned.ignored[scanned.spelling[name]] = f"it needs --optimizer {prefix}"
    for name in TOKEN_FILE_FIELDS if values.get("data_path") == MOCK_DATA else ():
        if name in scanned.values:
            scanned.ignored[scanned.spelling[name]] = "random tokens are not read from files"
    if "--no-pipeline-parallel" in converted:
        stages = values.get("pipe_parallel_size", 0)
        if stages > 1:
            scanned.problems.append(
                f"--no-pipeline-parallel needs one stage, got --pipe-parallel-size {stages}. Remove one of them"
            )
        scanned.ignored["--no-pipeline-parallel"] = "there is no pipeline"
    if "--num-unique-layers" in converted:
        layers = values.get("num_layers")
        if layers is not None and converted["--num-unique-layers"] != layers:
            scanned.problems.append(
                "--num-unique-layers must equal --num-layers, because layers do not share weights, got "
                f"{converted['--num-unique-layers']} and {layers}. Remove it"
            )
        scanned.ignored["--num-unique-layers"] = "layers share no weights"
    relative = values.get("position_embedding_type", "relative") == "relative"
    if FAMILIES[family].model_type == "encoder-decoder" and relative and "max_position_embeddings" in scanned.values:
        del values["max_position_embeddings"]
        scanned.ignored["--max-position-embeddings"] = "relative positions have no maximum length"


def _resolve_tokenizer_type(scanned: Scan, values: Mapping[str, Any]) -> None:
    """Ignore an unknown tokenizer type if the tokenizer's files determine the type."""
    name = scanned.unknown_tokenizer_type
    if name and values.get("tokenizer_path"):
        scanned.ignored[f"--tokenizer-type {name}"] = "the files of --tokenizer-path determine the type"
    elif name:
        scanned.problems.append(
            f"--tokenizer-type must be one of {', '.join(TOKENIZERS)}, got {name!r}. It is optional with "
            "--tokenizer-path"
        )


def _reject_latent_head_norm(scanned: Scan, values: Mapping[str, Any]) -> None:
    """Reject --qk-norm head with multi-latent attention, whose queries and keys have no norms of heads.

    Megatron's --qk-layernorm sets the same value, but selects the norms of latents there, which ours always have.
    """
    if values.get("multi_latent_attention") and scanned.spelling.get("qk_norm") == "--qk-norm head":
        scanned.problems.append(
            "--multi-latent-attention does not support --qk-norm head: its norms are those of the latents, which need "
            "no flag. Remove --qk-norm head or --multi-latent-attention"
        )


def _reject_dense_only(scanned: Scan, values: Mapping[str, Any]) -> None:
    """Add a problem for flags with the rule dense-only if the model has experts; a dense model ignores them."""
    if (values.get("num_experts") or 0) <= 1:
        return
    flags = [name for name in scanned.ignored if name.startswith("--")]
    rows = [foreign_flags()[flag] for flag in flags if flag in foreign_flags()]
    if names := [row.flag for row in rows if row.rule == DENSE_ONLY]:
        scanned.problems.append(
            f"not supported with --num-experts, since the results would change: {', '.join(names)}. Use the "
            "--moe-* flags of docs/flags.md"
        )


def _apply_mup(scanned: Scan, values: dict[str, Any], family: str) -> None:
    """Apply Megatron's muP, which uses the model itself as the base and divides scores by the head size."""
    recipe = scanned.converted.get("--scaling-recipe", "none")
    if recipe not in ("none", "mup"):
        scanned.problems.append(f"--scaling-recipe must be mup or none, got {recipe!r}. Remove it")
    if recipe != "mup" and "--use-mup" not in scanned.converted:
        if "--scaling-recipe" in scanned.converted:
            scanned.ignored["--scaling-recipe"] = "there is no muP"
        return
    if FAMILIES[family].model_type != "decoder":
        scanned.problems.append("--use-mup is supported in decoders only; remove it")
        return
    values.setdefault("mup_base_hidden_size", values.get("hidden_size", ModelConfig.hidden_size))
    if "softmax_scale" not in values:
        values.setdefault("mup_base_head_dim", 1)


def _set_linear_biases(scanned: Scan, values: dict[str, Any]) -> None:
    """Set ``hidden_bias`` from GPT-NeoX's switches for the biases of attention and feed-forward layers.

    A missing switch counts as true, as in GPT-NeoX.
    """
    flags = [flag for flag in ("--use-bias-in-attn-linear", "--use-bias-in-mlp") if flag in scanned.converted]
    if not flags:
        return
    attention, mlp = (scanned.converted.get(f"--use-bias-in-{layer}", True) for layer in ("attn-linear", "mlp"))
    if attention != mlp:
        scanned.problems.append(
            f"--use-bias-in-attn-linear and --use-bias-in-mlp must be equal, got {_bool_word(attention)} and "
            f"{_bool_word(mlp)} (a missing one is true): --hidden-bias adds biases to all linear layers. Set both to "
            "the same value"
        )
        return
    _set_agreeing(scanned, values, "hidden_bias", attention, f"{flags[0]} {_bool_word(attention)}")


def _set_norm_bias(scanned: Scan, values: dict[str, Any], family: str) -> None:
    """Set ``norm_bias`` from GPT-NeoX's switch, which has no effect on norms without biases."""
    flag = "--use-bias-in-norms"
    if flag not in scanned.converted:
        return
    default = FAMILIES[family].config.DEFAULTS.get("normalization", ModelConfig.normalization)
    normalization = values.get("normalization", default)
    if normalization != "LayerNorm":
        scanned.ignored[flag] = f"{normalization} has no bias"
    else:
        has_bias = scanned.converted[flag]
        _set_agreeing(scanned, values, "norm_bias", has_bias, f"{flag} {_bool_word(has_bias)}")


def _set_agreeing(scanned: Scan, values: dict[str, Any], field: str, value: bool, spelling: str) -> None:
    """Set a field from a converted flag, or add a problem if the field's own flag has a different value."""
    if field in scanned.values and scanned.values[field] != value:
        scanned.problems.append(f"{spelling} must agree with {scanned.spelling.get(field, field)}. Remove one of them")
    else:
        values[field] = value


def _bool_word(value: bool) -> str:
    return "true" if value else "false"


def _set_gelu(scanned: Scan, values: dict[str, Any]) -> None:
    """Set the form of GELU from Megatron's switches for a fused kernel, which computes the tanh form."""
    for flag, before, after in (
        ("--no-bias-gelu-fusion", "gelu-tanh", "gelu"),
        ("--bias-gelu-fusion", "gelu", "gelu-tanh"),
    ):
        if flag not in scanned.converted:
            continue
        if "activation" not in scanned.values and values.get("activation", "gelu") == before:
            values["activation"] = after
        else:
            scanned.ignored[flag] = "another flag sets the activation"


def _ignore_fpdt(scanned: Scan, values: Mapping[str, Any]) -> None:
    """Ignore DeepSpeed's chunks of long sequences, or add a problem if their layers would compute something else.

    These layers have no dropout of hidden states, and GELU in its tanh form is their only activation.
    """
    flag = "--ds-sequence-parallel-fpdt"
    if flag not in scanned.converted:
        return
    dropout, activation = values.get("hidden_dropout", ModelConfig.hidden_dropout), values.get("activation", "gelu")
    if dropout or activation != "gelu-tanh":
        scanned.problems.append(
            f"{flag} needs --hidden-dropout 0 and --activation gelu-tanh, which its layers compute in any case, got "
            f"--hidden-dropout {dropout:g} and --activation {activation}. Change them, or remove {flag}"
        )
    scanned.ignored[flag] = "chunks of sequences save memory only"
