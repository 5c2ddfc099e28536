"""Checks that involve several sections of the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron.arguments import fp8_checks, run_checks, seq_length_checks, unused_flags
from megatron.config import decoder, run_length
from megatron.config.callback_files import callback_problems
from megatron.config.config import Config
from megatron.config.experts import expert_rank_problems
from megatron.config.layer_types import has_attention
from megatron.config.option import is_derived, options_of
from megatron.config.parallel import ALL_TO_ALL, HIERARCHICAL, P2P
from megatron.config.pipeline_layout import FLAG as LAYOUT_FLAG
from megatron.config.pipeline_layout import num_layers, parse_layout
from megatron.errors import raise_all
from megatron.mpu.topology import format_axes, format_sizes
from tds.schedule import read_schedule
from tds.schedule.simulate import bubble, candidate_schedules

# ZeRO and offload: which flags can be combined, and which would have no effect.

SHARDED_WEIGHTS_STAGE = 3
OFFLOAD_FLAGS = {
    "cpu_adam": "--cpu-adam",
    "no_pin_memory": "--no-pin-memory",
}
"""Fields that control how tensors are offloaded -> their flags."""


def zero_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each ZeRO or offload flag that conflicts with other settings."""
    optimizer, parallel = config.optimizer, config.parallel
    stage = optimizer.zero_stage
    if stage > 1 and not parallel.overlap_grad_reduce:
        yield (
            f"{_stage_source(config)} {stage} reduces gradients during the backward pass, so that no replica holds all "
            "of them, got --no-overlap-grad-reduce. Remove it, or use --zero-stage 1"
        )
    if stage > 1 and parallel.gradient_accumulation_fusion:
        yield (
            "--gradient-accumulation-fusion accumulates into unsharded gradients in place, got "
            f"{_stage_source(config)} {stage}, which reduces them over the replicas in each micro-batch and stores "
            "only shards. Use --zero-stage 1, or remove --gradient-accumulation-fusion"
        )
    if stage == SHARDED_WEIGHTS_STAGE and getattr(parallel, "compile", False):
        yield (
            "--compile does not support --zero-stage 3, which gathers the weights of a layer in module hooks that a "
            "compiled layer does not run at the right time. Use --zero-stage 2, or remove --compile"
        )
    has_drift_check = "drift_interval" in config.explicit_fields and config.stability.drift_interval
    if stage == SHARDED_WEIGHTS_STAGE and has_drift_check and parallel.model_parallel_size == 1:
        yield (
            "--drift-interval compares the copies of a weight, of which --zero-stage 3 stores only one, sharded over "
            "the replicas. Remove it, or use --zero-stage 2"
        )
    if optimizer.offload_parameters and stage != SHARDED_WEIGHTS_STAGE:
        yield (
            f"--offload-parameters stores the weight shards of --zero-stage 3 on the CPU, got --zero-stage {stage}. "
            "Add --zero-stage 3, or use only --offload-optimizer"
        )
    if optimizer.cpu_adam == "deepspeed" and optimizer.offload_optimizer:
        yield from _adam_problems(config)
    flags = [flag for name, flag in OFFLOAD_FLAGS.items() if name in config.explicit_fields]
    if "no_pin_memory" in config.explicit_fields and optimizer.offload_parameters:
        flags.remove(OFFLOAD_FLAGS["no_pin_memory"])
    if flags and not optimizer.offload_optimizer:
        yield f"{', '.join(flags)} has no effect without --offload-optimizer. Add --offload-optimizer, or remove it"


def _stage_source(config: Config) -> str:
    return "--zero-stage" if "zero_stage" in config.explicit_fields else "zero_optimization.stage of the JSON"


def _adam_problems(config: Config) -> Iterator[str]:
    got = config.optimizer.optimizer
    if got != "adamw":
        yield (
            f"--cpu-adam deepspeed implements AdamW only, got --optimizer {got}. Use --optimizer adamw, or --cpu-adam "
            "torch"
        )
    if config.precision.dtype == "fp64":
        yield (
            "--cpu-adam deepspeed supports fp32 main params only, got --fp64. Use --cpu-adam torch, or another number "
            "format"
        )


def zero_notes(config: Config, world_size: int) -> Iterator[str]:
    """Yield a note for each ZeRO or offload setting that is accepted although it has no effect."""
    optimizer, json = config.optimizer, config.deepspeed.get("zero_optimization", {})
    replicas = config.parallel.data_parallel_size(world_size) * config.parallel.context_parallel_size
    if optimizer.zero_stage and replicas == 1 and not optimizer.offload_parameters:
        yield f"ZeRO {optimizer.zero_stage} has no effect with one replica"
    if replicas == 1 and not config.parallel.overlap_grad_reduce:
        yield "--no-overlap-grad-reduce has no effect with one replica, which reduces no gradients"
    for name in ("offload_optimizer", "offload_param"):
        section = json.get(name) or {}
        if "pin_memory" in section and section.get("device", "none") == "none":
            yield f"the JSON's zero_optimization.{name}.pin_memory has no effect: nothing is offloaded there"
    if optimizer.no_pin_memory and config.parallel.device == "cpu":
        yield "--no-pin-memory has no effect on a CPU, which copies nothing to a device"


# Checks of --sequence-parallel, which splits the activations between tensor-parallel products along the sequence.


def sequence_parallel_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each flag or length that does not work with --sequence-parallel."""
    parallel = config.parallel
    if not parallel.sequence_parallel:
        return
    t = parallel.model_parallel_size
    if t == 1:
        yield (
            "--sequence-parallel shards activations over the tensor ranks, got --model-parallel-size 1. Remove it, or "
            "use --model-parallel-size 2 or more"
        )
    if parallel.partition_activations and parallel.checkpoint_activations:
        yield (
            "--partition-activations has no effect with --sequence-parallel, which already shards the inputs of "
            "layers over the tensor ranks. Remove --partition-activations"
        )
    flags = ("--enc-seq-length", "--dec-seq-length") if config.family_config.is_encoder_decoder else ("--seq-length",)
    for flag, length in zip(flags, config.sequence_lengths, strict=True):
        if length % t:
            yield (
                f"with --sequence-parallel {flag} must be a multiple of --model-parallel-size, got {length} and {t} "
                f"({length} / {t} = {length / t:g}). Use {flag} {-(-length // t) * t}, or remove --sequence-parallel"
            )


# Checks of --context-parallel-size, which splits sequences over ranks, attention included.


def context_parallel_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each flag or size that does not work with --context-parallel-size."""
    parallel, model = config.parallel, config.model
    c, t = parallel.context_parallel_size, parallel.model_parallel_size
    if c == 1:
        return
    got = f"got --context-parallel-size {c}"
    if config.family_config.is_encoder_decoder:
        yield (
            f"--context-parallel-size does not support T5, {got}: it splits one sequence, but T5's decoder also "
            "attends to the encoder's sequence, and its biases depend on distances within a sequence. Use "
            "--sequence-parallel, which splits everything except attention, or remove it"
        )
        return
    length, parts = config.batch.seq_length, 2 * c * (t if parallel.sequence_parallel else 1)
    if length % parts:
        tensor = f" x --model-parallel-size {t}" if parallel.sequence_parallel else ""
        yield (
            f"--seq-length must be a multiple of 2 x --context-parallel-size{tensor}, two chunks per rank, got "
            f"{length} and 2 x {c}{f' x {t}' if tensor else ''} = {parts} ({length} / {parts} = {length / parts:g}). "
            f"Use --seq-length {-(-length // parts) * parts}, or another --context-parallel-size"
        )
    types = parallel.cp_comm_type.split()
    yield from _context_type_problems(config)
    for comm_type in (ALL_TO_ALL, HIERARCHICAL):
        ranks = parallel.head_ranks_of(comm_type)
        if comm_type not in types or ranks == 1:
            continue
        heads = {"--num-attention-heads": model.num_attention_heads}
        if config.family_config.KIND == "decoder" and model.num_query_groups != model.num_attention_heads:
            heads["--num-query-groups"] = model.num_query_groups
        if config.family_config.KIND == "decoder" and model.window_num_query_groups:
            heads["--window-num-query-groups"] = model.window_num_query_groups
        for flag, count in heads.items():
            if count % (t * ranks):
                yield (
                    f"--cp-comm-type {comm_type} distributes the heads of a tensor rank over {ranks} context ranks, so "
                    f"{flag} must be a multiple of {t} x {ranks} = {t * ranks}, got {count}. Use --cp-comm-type "
                    "all_gather, which splits queries instead of heads"
                )
    if parallel.compile:
        yield (f"--compile does not support the exchange of keys and values within a layer, {got}. Remove one of them")
    if config.debug.debug_dump is not None:
        yield (
            f"--debug-dump writes hidden states that tools/compare_dumps.py interprets as full sequences, {got}. "
            "Remove one of them; --debug-nan works with context parallelism"
        )


def _context_type_problems(config: Config) -> Iterator[str]:
    """Yield an error message if the types of --cp-comm-type do not fit the layers or the hierarchical sizes."""
    parallel, num_layers = config.parallel, config.total_layers
    c, types, sizes = parallel.context_parallel_size, parallel.cp_comm_type.split(), parallel.hierarchical_sizes
    if len(types) not in (1, num_layers):
        yield (
            f"--cp-comm-type must have one type, or one for each of the {num_layers} layers, got {len(types)}: "
            f"{parallel.cp_comm_type}"
        )
    elif len(set(types)) > 1 and config.family_config.KIND != "decoder":
        yield f"--cp-comm-type must be the same in all layers of this model, got {parallel.cp_comm_type}. Use one type"
    if HIERARCHICAL in types and (len(sizes) != 2 or math.prod(sizes) != c):
        yield (
            "--cp-comm-type a2a+p2p needs two --hierarchical-context-parallel-sizes whose product is "
            f"--context-parallel-size {c}, got {parallel.hierarchical_context_parallel_sizes or 'none'}. Set them"
        )


def context_parallel_notes(config: Config) -> Iterator[str]:
    """Yield a note if --cp-comm-type has no effect, or if its value is treated like another one."""
    parallel = config.parallel
    if "cp_comm_type" in config.explicit_fields and parallel.context_parallel_size == 1:
        yield f"--cp-comm-type {parallel.cp_comm_type} has no effect with --context-parallel-size 1"
    elif P2P in parallel.cp_comm_type.split() and parallel.context_parallel_size > 1:
        yield "--cp-comm-type p2p: keys and values are gathered, as with all_gather; the results are the same"
    elif HIERARCHICAL in parallel.cp_comm_type.split() and parallel.context_parallel_size > 1:
        yield (
            "--cp-comm-type a2a+p2p: keys and values are gathered over the outer group, where Megatron-LM sends them "
            "around a ring; the results are the same"
        )


# Checks that need more than one section. All problems are collected, then raised at once.
#
# A message states the requirement, the value and the fix. No check is an ``assert``, which ``python -O`` would skip.

FALLBACKS = ("bf16", "fp16", "fp32")
"""Number formats in order of preference. If a format is excluded, the next one is used."""


def find_problems(config: Config, world_size: int) -> list[str]:
    """Find all problems that can be detected without a device, data or a tokenizer.

    If any value is out of range, only the range problems are returned.
    """
    ranges = list(_range_problems(config))
    if ranges:
        return ranges
    sections = [section for section in config.sections().values() if hasattr(section, "problems")]
    section_problems = [problem for section in sections for problem in section.problems()]
    return [
        *section_problems,
        *_world_problems(config, world_size),
        *_divisibility_problems(config),
        *_cross_problems(config),
    ]


def model_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each invalid model setting, whether it comes from flags or from another source."""
    yield from config.family_config.problems()
    yield from _head_problems(config)
    yield from config.family_config.model_problems(config)
    yield from _activation_problems(config)


def _activation_problems(config: Config) -> Iterator[str]:
    if config.model.activation == "xielu" and config.family_config.KIND != "decoder":
        yield "--activation xielu is supported in decoders only. Use another activation"


def _range_problems(config: Config) -> Iterator[str]:
    for section in config.sections().values():
        for option in options_of(section.__class__):
            value = getattr(section, option.name)
            problem = option.problem(value, option.flag or option.name)
            if problem and not is_derived(option, value):
                yield problem


def _world_problems(config: Config, world_size: int) -> Iterator[str]:
    t, p, c = config.parallel.model_parallel_size, config.parallel.num_stages, config.parallel.context_parallel_size
    got, ranks = format_sizes(world_size, t, p, c), config.parallel.replica_size
    if t > world_size:
        yield f"--model-parallel-size must not exceed the world size, {got}. Start {ranks} processes, or lower it"
    elif world_size % ranks:
        below = world_size // ranks * ranks
        process_counts = " or ".join(str(n) for n in (below, below + ranks) if n)
        yield (
            f"world size must be a multiple of {format_axes(c)}, {got}. Start {process_counts} processes, or lower one "
            f"of the {'two' if c == 1 else 'three'} sizes"
        )
    else:
        yield from _ramp_problems(config, world_size // ranks)
        yield from expert_rank_problems(config, world_size // ranks * c)
    if config.parallel.has_pipeline:
        yield from _pipeline_file_problems(config)
        if config.parallel.pipeline_layout is None:
            yield from _stage_problems(config)


def _ramp_problems(config: Config, replicas: int) -> Iterator[str]:
    batch = config.batch
    if not batch.has_growing_batch:
        return
    if batch.rampup_batch_size is not None and batch.step_batch_size_schedule is not None:
        yield (
            f"--rampup-batch-size and --step-batch-size-schedule exclude each other, got {batch.rampup_batch_size} and "
            f"{batch.step_batch_size_schedule}. Remove one of them"
        )
        return
    try:
        batch_sizes = config.batch.batch_sizes(replicas).all()
    except ValueError as error:
        yield str(error)
        return
    micro = batch.batch_size
    flag, fix = (
        ("--step-batch-size-schedule", "its sizes")
        if batch.rampup_batch_size is None
        else ("--rampup-batch-size", "START or INCREMENT")
    )
    text = batch.rampup_batch_size or batch.step_batch_size_schedule
    invalid = run_length.indivisible(batch_sizes, micro * replicas)
    if invalid:
        yield (
            f"every batch size of {flag} {text} must be a multiple of "
            f"micro-batch x replicas = {micro} x {replicas} = {micro * replicas}, got {', '.join(map(str, invalid))} "
            f"among {', '.join(map(str, batch_sizes))}. Change {fix}, or lower --batch-size"
        )


def _pipeline_file_problems(config: Config) -> Iterator[str]:
    """Yield an error message if a schedule file, or a layout in Megatron's notation, conflicts with other settings."""
    parallel, m = config.parallel, config.batch.num_micro_batches
    if any(parallel.problems()):
        return
    if parallel.pipeline_schedule_file is not None:
        count = read_schedule(parallel.pipeline_schedule_file).num_micro_batches
        if count != m or config.batch.has_growing_batch:
            yield (
                f"--pipeline-schedule-file {parallel.pipeline_schedule_file} is for steps of {count} micro-batches, "
                f"got --gas {m}{'' if count != m else ' and a batch ramp-up'}. Use --gas {count}, or another file"
            )
    if parallel.pipeline_layout is not None:
        layers = num_layers(parse_layout(parallel.pipeline_layout))
        if config.family_config.is_encoder_decoder:
            yield f"{LAYOUT_FLAG} does not support encoder-decoder models. Use --partition-method, or remove it"
        elif layers != config.total_layers:
            yield f"{LAYOUT_FLAG} must contain all layers, got {layers} t and --num-layers {config.total_layers}"


def _stage_problems(config: Config) -> Iterator[str]:
    layers, p, chunks = config.total_layers, config.parallel.num_stages, config.parallel.chunks
    got = f"--num-layers {layers}"
    has_sides = config.family_config.is_encoder_decoder
    if has_sides:
        got = f"{config.family_config.enc_layers} encoder and {config.family_config.dec_layers} decoder layers"
    minimum = f"{p * chunks} layers or more in all" if has_sides else f"--num-layers {p * chunks} or more"
    if p > layers:
        allowed = f"0 to {layers}" if layers > 1 else "0 or 1"
        yield (
            f"every pipeline stage must have at least one layer, got {got} on --pipe-parallel-size {p}. Use "
            f"--pipe-parallel-size {allowed}, or {minimum}"
        )
    elif chunks > 1 and p * chunks > layers:
        allowed = f"1 to {layers // p}" if layers // p > 1 else "1"
        yield (
            f"every chunk of every pipeline stage must have at least one layer, got {got} on --pipe-parallel-size {p} "
            f"x --pipeline-chunks {chunks} = {p * chunks}. Use --pipeline-chunks {allowed}, or {minimum}"
        )


def _head_problems(config: Config) -> Iterator[str]:
    model = config.model
    h, a = model.hidden_size, model.num_attention_heads
    is_derived = "kv_hidden_size" not in config.explicit_fields and not model.multi_latent_attention
    if h % a and is_derived and model.kv_hidden_size == h // a:
        divisors = [n for n in range(1, min(h, 4 * a) + 1) if h % n == 0]
        yield (
            f"--hidden-size must be a multiple of --num-attention-heads, got {h} and {a} ({h} / {a} = {h / a:g}). "
            f"Use one of {divisors} heads, or set --kv-hidden-size, the size of one head"
        )


def _divisibility_problems(config: Config) -> Iterator[str]:
    model, t = config.model, config.parallel.model_parallel_size
    yield from _head_problems(config)
    split_sizes = {  # heads are never split, so any --kv-hidden-size fits if the number of heads does
        **({"--num-attention-heads": model.num_attention_heads} if has_attention(model) else {}),
        "--hidden-size": model.hidden_size,
        "--ff-hidden-size": model.ff_hidden_size,
    }
    for name, size in split_sizes.items():
        if size % t:
            allowed = [
                n for n in range(1, min(size, 64) + 1) if all(dimension % n == 0 for dimension in split_sizes.values())
            ]
            yield (
                f"{name} must be a multiple of --model-parallel-size, got {size} and {t} ({size} / {t} = "
                f"{size / t:g}). For these sizes --model-parallel-size may be one of {allowed}"
            )


def _cross_problems(config: Config) -> Iterator[str]:
    t = config.parallel.model_parallel_size
    yield from config.family_config.check(config)
    yield from _activation_problems(config)
    if not (config.run.dry_run or config.run.prove_only):  # neither reads data
        yield from config.data.missing_files(reads_span_files=config.family_config.READS_SPAN_FILES)
    if not config.run.prove_only:  # which calls no callback
        yield from callback_problems(config.run.callback)
    if config.run.check_paths and not config.run.dry_run:
        yield "--check-paths has no effect without --dry-run, because a run always checks its paths. Remove it"
    precision = config.precision
    is_too_high = precision.is_dynamic and precision.min_scale > 2.0**precision.initial_scale_power
    if precision.dtype in (None, "fp16") and is_too_high:
        yield (
            f"--min-scale must not exceed the initial loss scale, got {precision.min_scale:g} and "
            f"--initial-scale-power {precision.initial_scale_power} (2^{precision.initial_scale_power} = "
            f"{2**precision.initial_scale_power}). Lower --min-scale, or raise --initial-scale-power"
        )
    if config.parallel.fused_kernels == "apex" and precision.dtype == "fp64":
        yield "--fused-kernels apex needs fp32, bf16 or fp16, got --fp64. Use --fused-kernels torch"
    if config.parallel.fused_kernels == "apex" and config.parallel.device not in ("auto", "cuda"):
        yield (
            f"--fused-kernels apex needs a GPU, got --device {config.parallel.device}: apex has kernels for CUDA only. "
            "Remove it"
        )
    if config.optimizer.optimizer == "adafactor" and t > 1:
        yield (
            "--optimizer adafactor averages over the rows and columns of full matrices, got --model-parallel-size "
            f"{t}, which shards them. Use --optimizer adamw, or --pipe-parallel-size instead of --model-parallel-size"
        )
    yield from _tied_rate_problems(config)
    yield from sequence_parallel_problems(config)
    yield from context_parallel_problems(config)
    yield from seq_length_checks.schedule_problems(config)
    yield from seq_length_checks.curriculum_problems(config)
    yield from unused_flags.unused_flag_problems(config)
    yield from run_checks.stability_problems(config)
    yield from zero_problems(config)
    yield from fp8_checks.fp8_problems(config)
    yield from run_checks.debug_problems(config)
    yield from run_checks.logging_problems(config)
    if config.parallel.device == "cpu":
        yield from _cpu_problems(config)


def _tied_rate_problems(config: Config) -> Iterator[str]:
    settings = config.optimizer
    if settings.lr_head is None or config.model.untie_embeddings or settings.lr_head == settings.lr_embedding:
        return
    embedding = settings.lr if settings.lr_embedding is None else settings.lr_embedding
    yield (
        "--lr-head needs an untied output head, but this head shares the weights of the word embedding, got --lr-head "
        f"{settings.lr_head:g} and {embedding:g} for the word embedding. Use only --lr-embedding, or add "
        "--untie-embeddings-and-output-weights"
    )


def device_problems(config: Config, has_gpu: bool, has_bf16: bool = True) -> list[str]:
    """Find reasons why this machine's devices cannot run the configuration."""
    if config.parallel.device == "cuda" and not has_gpu:
        return ["--device cuda needs a CUDA device that torch can use, got none. Use --device cpu"]
    if not has_gpu or config.parallel.device == "cpu":
        return list(_cpu_problems(config))
    if config.precision.dtype == "bf16" and not has_bf16:
        return [
            "--bf16 needs a GPU with bf16 arithmetic (compute capability 8.0 or more), got an older one. Use --fp16"
        ]
    return []


def _cpu_problems(config: Config) -> Iterator[str]:
    if config.precision.dtype == "fp16":
        yield (
            "fp16 needs a GPU, got a CPU: CPUs have no fast fp16 arithmetic and many kernels lack it. "
            "Use --bf16 (same memory, no loss scale; slow on CPUs without bf16 instructions) or --fp32"
        )
    if config.parallel.distributed_backend == "nccl":
        yield "--distributed-backend nccl needs GPUs, got a CPU. Use gloo, or remove the flag"


def check_device(config: Config, has_gpu: bool, has_bf16: bool = True) -> None:
    """Raise ConfigError with all ``device_problems``, if there are any."""
    raise_all(device_problems(config, has_gpu, has_bf16))


def resolve_dtype(config: Config, device_default: str) -> Config:
    """Return ``config`` with the stated number format, or with the device's default.

    The default is ``device_default``, or the next of bf16, fp16 and fp32 if the JSON disables that format. With
    --fp8-format, the default is bf16 on every device.

    Raises:
        ConfigError: the format is fp16, and flags of a dynamic loss scale were given together with a fixed scale.
    """
    if config.precision.dtype is not None:
        return config
    excluded = config.precision.excluded
    if config.precision.fp8_format is not None:
        device_default = "bf16"
    order = FALLBACKS[FALLBACKS.index(device_default) :] if device_default in FALLBACKS else (device_default,)
    dtype = next(name for name in order if name not in excluded)
    notes = list(config.notes)
    if dtype != device_default:
        left_out = ", ".join(f"{name}.enabled false" for name in excluded)
        notes.append(
            f"number format: {dtype}; the default of this device is {device_default}, but the JSON has {left_out}"
        )
    config = replace(config, precision=replace(config.precision, dtype=dtype))
    raise_all(list(unused_flags.scaling_problems(config)))
    return replace(config, notes=(*notes, *unused_flags.scaling_notes(config)))


def resolve_fusion(config: Config, device_type: str) -> Config:
    """Return ``config`` with the choice of ``--gradient-accumulation-fusion`` on this device type, for the records."""
    fuses = config.fuses_accumulation(device_type)
    return replace(config, parallel=replace(config.parallel, gradient_accumulation_fusion=fuses))


def expected_bubble(config: Config, num_micro_batches: int | None = None) -> float:
    """Estimate the idle fraction for equally slow stages; for the schedule "auto", the lowest candidate."""
    parallel, m = config.parallel, num_micro_batches or config.batch.gas
    names = candidate_schedules(parallel.schedule, parallel.chunks, parallel.placement)
    return min(bubble(parallel.num_stages, m, name, parallel.chunks) for name in names)


def notes_of(config: Config, world_size: int) -> list[str]:
    """Collect user notes about a valid configuration on ``world_size`` ranks."""
    notes = []
    p, m = config.parallel.num_stages, config.batch.gas
    if config.parallel.micro_batch_group_size and not config.parallel.group_size:
        notes.append(
            "--microbatch-group-size-per-virtual-pipeline-stage has no effect without several chunks in a loop"
        )
    if config.parallel.has_pipeline and m < p and config.parallel.pipeline_schedule_file is None:
        idle, lower_idle = expected_bubble(config), expected_bubble(config, 4 * p)
        notes.append(
            f"warning: {m} micro-batches on {p} stages leave the stages idle {idle:.0%} of the time; "
            f"raise --gas to {4 * p} for {lower_idle:.0%}"
        )
    decay_iters = config.optimizer.lr_decay_iters
    if config.optimizer.lr_decay_style == "inverse-square-root" and 0 < decay_iters < config.batch.train_iters:
        notes.append(
            f"--lr-decay-style inverse-square-root continues to decay after --lr-decay-iters {decay_iters}; "
            "Megatron-LM stays at --min-lr from there on"
        )
    if config.batch.train_iters == 0:
        notes.append("--train-iters 0: no training step; the initial model is evaluated and saved")
    beta2 = config.optimizer.adam_beta2
    if "exp_avg_sq" in config.optimizer.bf16_states and 1 - beta2 < 2**-8:
        notes.append(
            "warning: --exp-avg-sq-dtype bf16 has 8 bits of precision, too few for the decay of the second moment by "
            f"{1 - beta2:g} per step with --adam-beta2 {beta2:g}: the moment may not decay at all. Use --adam-beta2 "
            "0.99 or less, or fp32"
        )
    return [
        *notes,
        *config.family_config.notes(config),
        *unused_flags.notes(config, world_size),
        *run_checks.stability_notes(config, world_size),
        *zero_notes(config, world_size),
        *fp8_checks.fp8_notes(config),
        *context_parallel_notes(config),
        *decoder.window_notes(config),
    ]
