"""--dry-run: compute a run's plan (layout, memory, pipeline bubble) without starting it. No torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron import log
from megatron.arguments.messages import with_variables
from megatron.config import Config
from megatron.config.data import SPLIT_PATH_FIELDS
from megatron.config.layer_types import EXPERTS, LayerType, is_hybrid, layer_types, recurrent_mixers
from megatron.config.newton_schulz import newton_schulz_flops
from megatron.config.parallel import ALL_TO_ALL, HIERARCHICAL, P2P
from megatron.data.mock_dataset import MockTokenizer
from megatron.errors import ConfigError, raise_all
from megatron.log import human_bytes, human_count
from megatron.models import registry
from megatron.models.t5.config import t5_units
from megatron.mpu.topology import Topology
from megatron.training import auto_placement, plan_checks
from megatron.training.console import TrainingConsole
from megatron.training.estimates import is_config_model, is_on_cpu, schedule_args, stage_memory
from megatron.training.schedule_rows import epoch_rows, schedule_rows
from megatron.training.vocabulary import family_vocabulary, with_tokenizer, with_vocabulary
from tds.partition import chunks_on
from tds.schedule import V
from tds.schedule.simulate import AUTO, bubble, candidate_schedules, in_flight, is_auto, schedule_path

# Rows of the start table on the data and on the construction of samples.


def sample_rows(config: Config) -> Iterator[tuple[str, str]]:
    """Yield rows on sample construction; none for GPT-2 with documents simply concatenated."""
    data = config.data
    if config.family_config.is_encoder_decoder and data.has_dynamic_spans:
        yield "spans", _spans_text(config)
    if data.sft is not None:
        yield "packing", "best-fit: full conversations, separated in attention; loss only on the assistant's messages"
    elif data.packing == "best-fit":
        yield "packing", "best-fit: full documents, separated in attention; the unused end of a sample is padded"
    if data.fim_rate:
        first = f"{100 * data.fim_spm_rate:g} % with the suffix first"
        yield "fill in the middle", f"{100 * data.fim_rate:g} % of the documents, of these {first}"


def data_text(config: Config) -> str:
    """Describe the token files by split."""
    data = config.data
    if data.is_mock:
        return "random tokens"
    if data.sft is not None and data.valid_sft is not None:
        paths = f"conversations train {data.sft}, valid {data.valid_sft}"
    elif data.sft is not None:
        by_hash_text = " by hash" if data.split_by == "hash" else ""
        paths = f"conversations {data.sft}, split {data.split}{by_hash_text}"
    elif data.data_path is not None:
        by_hash_text = " by hash" if data.split_by == "hash" else ""
        paths = f"{data.data_path}, split {data.split}{by_hash_text}"
    else:
        split_texts = [
            f"{name.split('_')[0]} {getattr(data, name)}"
            for name in SPLIT_PATH_FIELDS
            if getattr(data, name) is not None
        ]
        paths = ", ".join(split_texts) or "the script's data sets"
    return paths + (f", mixture schedule {data.mixture_schedule}" if data.mixture_schedule else "")


def _spans_text(config: Config) -> str:
    """Describe T5's samples: input and target tokens, and the noise."""
    t5 = config.family_config
    noise = f"noise density {t5.noise_density:g}, mean span length {t5.mean_span_length:g}"
    if t5.denoisers != "R":
        noise = f"denoisers {t5.denoisers}"
    prefix = "up to " if len(t5.parsed_denoisers) > 1 else ""
    text = f"{t5.raw_length} text tokens become {prefix}{t5.enc_seq_length} input tokens"
    return f"{text} and {prefix}{t5.max_target_length} target tokens; {noise}"


# Rows of the start table for a configuration on a grid of ranks; they need no model.

TEXT_VOCABULARY = "MEGATRON_TEXT_VOCABULARY"
"""Environment variable: vocabulary size of the sample data that the run script creates before the run."""

BubbleForecast = Callable[[int, int, str, int, Sequence[float] | None], float]


def dry_run(config: Config, world_size: int, program: str = "", run_name: str = "") -> None:
    """Print the start table for a run on ``world_size`` ranks, without starting it. Only rank 0 prints.

    Args:
        program: program file name; the program's data sets may need a tokenizer.
        run_name: prefix of the program's run folders.

    Raises:
        ConfigError: the run would reject the flags, or with ``--check-paths`` this machine lacks files or devices.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    tokenizer, config = with_tokenizer(config)
    if tokenizer is None and TEXT_VOCABULARY in os.environ:
        tokenizer = MockTokenizer(int(os.environ[TEXT_VOCABULARY]))
        config = with_vocabulary(tokenizer, config)
    if config.model.vocab_size is None:
        raise_all(with_variables(list(plan_checks.tokenizer_problems(config, program)), os.environ))
        problem = "--dry-run needs a vocabulary size, got no --tokenizer-path and no --vocab-size. Add one of them"
        raise ConfigError(with_variables([problem], os.environ)[0])
    if config.family_config.is_encoder_decoder and tokenizer is not None and config.data.has_dynamic_spans:
        flag = f"--enc-seq-length {config.family_config.enc_seq_length}"
        family_vocabulary(tokenizer, config).require_sentinels(config.family_config.max_num_spans, flag)
    raise_all(list(plan_checks.combination_problems(config, tokenizer, program)))
    parallel = config.parallel
    parallel_sizes = parallel.model_parallel_size, parallel.num_stages, parallel.context_parallel_size
    topology = Topology.from_world_size(world_size, *parallel_sizes, *config.expert_sizes, parallel.context_inner)
    dtype = config.precision.dtype or "the device's default"
    if auto_placement.should_choose_placement(config):
        config = auto_placement.with_placement(config, topology, dtype, _local_memory_bytes(config, world_size))
    bounds = registry.bounds_of(config, topology.pipe)
    memory = stage_memory(config, topology, bounds, dtype)
    makes_data = TEXT_VOCABULARY in os.environ
    missing_resources = list(
        plan_checks.machine_problems(config, world_size, memory, run_name=run_name, makes_data=makes_data)
    )
    if config.run.check_paths:
        raise_all(missing_resources)
    console = TrainingConsole("plain", config.batch.train_iters)
    for note in config.notes:
        log.info(note)
    for warning in config.dropped.values():
        log.warning(warning)
    rows = [*plan_rows(config, topology, bounds, dtype), *epoch_rows(config, topology.data)]
    console.table("Plan (nothing was started)", rows)
    for problem in missing_resources:
        log.warning(f"{problem} (--check-paths makes this an error)")


def _local_memory_bytes(config: Config, world_size: int) -> int | None:
    """Return the usable memory per rank on this machine in bytes; None if the planned devices are not present."""
    device_type = "cpu"
    if not is_on_cpu(config):
        from megatron import device  # imports torch, which a dry run on CPUs does not need

        device_type = device.choose("auto") if config.parallel.device == "auto" else config.parallel.device
        if not device.is_available(device_type):
            return None
    return auto_placement.usable_bytes(device_type, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))


def plan_rows(
    config: Config,
    topology: Topology,
    bounds: Sequence[int],
    dtype: str,
    parameter_counts: Sequence[int] | None = None,
    forecast: BubbleForecast | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield (name, text) rows.

    Args:
        bounds: virtual-stage bounds in pipeline layers; with chunks, a stage has several virtual stages.
        parameter_counts: parameter count in the full model, then per rank of each stage. None before the model is
            built: the rows then describe the model in ``config``.
        forecast: returns the bubble, with the signature of ``tds.schedule.simulate.bubble``. None: use that function's
            closed forms.
    """
    batch, num_replicas = config.batch, topology.data
    world_size = topology.world_size
    ranks = f"{world_size} rank{'' if world_size == 1 else 's'}"
    context_text = f" x context {topology.context}" if topology.context > 1 else ""
    yield "layout", f"{ranks} = pipe {topology.pipe} x data {num_replicas}{context_text} x tensor {topology.tensor}"
    is_known_model = parameter_counts is None or is_config_model(config, parameter_counts)
    if parameter_counts is None or is_known_model:
        yield "model", model_text(config)
        yield from _stage_rows(config, topology, bounds, dtype)
    else:
        yield from _custom_model_rows(config, parameter_counts, bounds)
    lengths = config.sequence_lengths
    sample = f"sequence {lengths[0]}" if len(lengths) == 1 else f"(encoder {lengths[0]} + decoder {lengths[-1]})"
    yield (
        "tokens per step",
        f"{batch.global_batch_size(num_replicas) * config.tokens_per_sample:,} = {sample} x micro-batch "
        f"{batch.batch_size} x {batch.describe_gas(num_replicas)} micro-batches x {num_replicas} replicas",
    )
    if batch.rampup_batch_size is not None:
        start, increment, samples = batch.rampup_batch_size.split()
        yield "batch ramp-up", f"from {start} samples per step by {increment} over {int(samples):,} samples"
    elif batch.step_batch_size_schedule is not None:
        sizes = batch.batch_sizes(num_replicas)
        first, *later = [*sizes.starts, (sizes.samples, sizes.full)]
        changes = (f"{size} from sample {start:,} on" for start, size in later)
        yield "batch schedule", ", ".join([f"{first[1]} samples per step", *changes])
    yield from schedule_rows(config, num_replicas)
    yield from _length_rows(config, num_replicas)
    yield from sample_rows(config)
    yield from _layer_rows(config)
    yield from _context_rows(config)
    yield from _expert_rows(config)
    if topology.pipe > 1:
        yield from _pipeline_rows(config, topology.pipe, bounds, forecast, is_known_model)
    yield from _zero_rows(config, topology.data_context)
    if config.ignored:
        yield "ignored", ignored_text(config)
    if config.dropped:
        yield "dropped", f"unknown flags: {', '.join(config.dropped)}"
    if config.shadowed:
        yield "no effect", "; ".join(f"{flag} ({reason})" for flag, reason in config.shadowed.items())
    if config.optimizer.is_muon:
        yield "optimizer", _muon_text(config, topology)
    if config.optimizer.optimizer == "sgd":
        yield "optimizer", f"SGD, momentum {config.optimizer.sgd_momentum:g}"
    if states_text := _adam_states_text(config):
        yield "AdamW's states", f"{states_text}; updates are computed in the main params' precision"
    yield "precision", f"{dtype}, gradient norm clipping {config.optimizer.clip_grad or 'off'}"
    yield "data", data_text(config)


def _adam_states_text(config: Config) -> str:
    """Name the states of AdamW that are stored in bf16 or 8 bits; "" if there are none."""
    settings = config.optimizer
    formats = (("bf16", settings.bf16_states), ("8 bits", settings.quantized_states))
    return ", ".join(f"{' and '.join(names)} in {name}" for name, names in formats if names)


def _muon_text(config: Config, topology: Topology) -> str:
    """Describe the parameters that Muon updates, and the ranks that own the matrices."""
    settings, num_owners = config.optimizer, topology.tensor * topology.data_context
    costs = registry.costs_of(config).with_expert_ranks(1)
    matrix_groups = costs.stage_matrices([0, costs.num_units])[0]
    flops = sum(
        group.count * newton_schulz_flops(group.inner, group.columns, settings.muon_num_ns_steps)
        for group in matrix_groups
    )
    name, details = "Muon", f"momentum {settings.muon_momentum:g}, {settings.muon_scale_mode}"
    if settings.optimizer == "adaptive_muon":
        name = "NorMuon" if settings.adaptive_muon_moment2_method == "normuon" else "AdaMuon"
        details += f", beta2 {settings.adaptive_muon_beta2:g}"
    if settings.muon_coefficient_type != "simple":
        details += f", {settings.muon_coefficient_type}"
    text = (
        f"{name} for {human_count(sum(group.weights for group in matrix_groups))} parameters in matrices of layers "
        f"({details}), AdamW for all others; Newton-Schulz takes {flops / 1e12:,.3g} TFLOP per step"
    )
    if num_owners == 1:
        return text
    num_expert_owners = topology.expert_copies * topology.expert_shards
    expert_text = f", {num_expert_owners} owners of each expert's" if num_expert_owners < num_owners else ""
    return f"{text}, by {num_owners} owners of full matrices on each stage{expert_text}"


def _length_rows(config: Config, replicas: int) -> Iterator[tuple[str, str]]:
    """Yield the row on the sequence lengths and the token counts or steps at which they start."""
    batch_sizes, lengths = config.batch.batch_sizes(replicas), config.batch.seq_lengths
    if not lengths.is_changing:
        return
    if lengths.truncates:
        (_, shortest), *others = lengths.curriculum
        last_text = f", {others[-1][1]:,} from step {others[-1][0]:,} on" if others else ""
        count_text = f" ({len(others) + 1:,} lengths)" if len(others) > 1 else ""
        yield (
            "sequence length",
            f"{shortest:,} in step 1{last_text}{count_text}; samples are truncated, and evaluations use "
            f"{lengths.full:,}",
        )
        return
    first_phase, *later_phases = lengths.starts()
    changes = [
        f"{length} from {tokens:,} tokens on (about step {batch_sizes.steps_until(sample) + 1:,})"
        for tokens, sample, length in later_phases
    ]
    yield "sequence length", f"{first_phase[2]}, {', '.join(changes)}; chunks of the same samples"


def ignored_text(config: Config) -> str:
    """List ignored flags and keys as text: "3 flags and 1 key have no effect: ..."."""
    flags = [name for name in config.ignored if name.startswith("--")]
    keys = [name for name in config.ignored if not name.startswith("--")]
    counts = [
        f"{len(names)} {noun}{'s' * (len(names) > 1)}" for names, noun in ((flags, "flag"), (keys, "key")) if names
    ]
    verb = "has" if len(config.ignored) == 1 else "have"
    return f"{' and '.join(counts)} {verb} no effect: {', '.join([*flags, *keys])}"


def _custom_model_rows(
    config: Config, parameter_counts: Sequence[int], bounds: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Yield rows for a user's model, with only known parameter counts and bounds."""
    yield "model", f"{human_count(parameter_counts[0])} parameters"
    num_stages = len(parameter_counts) - 1
    for stage, num_parameters in enumerate(parameter_counts[1:]):
        layers = (
            f"layers {layers_text(bounds, num_stages, stage, config.parallel.placement)}, " if num_stages > 1 else ""
        )
        activations_text = f"; {_activations_text(config, bounds, num_stages, stage)}" if num_stages > 1 else ""
        yield f"stage {stage}", f"{layers}{human_count(num_parameters)} parameters on each rank{activations_text}"


def model_text(config: Config) -> str:
    """Describe the size of the model in ``config``."""
    model, family_config = config.model, config.family_config
    layers, family_text = f"{model.num_layers} layers", family_config.summary(model)
    if family_config.is_encoder_decoder:
        layers = f"{family_config.enc_layers} encoder and {family_config.dec_layers} decoder layers"
    costs = registry.costs_of(config)
    if model.mtp_num_layers:
        layers += f" and {model.mtp_num_layers} for multi-token prediction"
    active_text = f" in total, {human_count(costs.num_active_parameters)} active" if model.num_experts else ""
    return (
        f"{human_count(costs.num_parameters)} parameters{active_text}: {layers}, hidden {model.hidden_size}, "
        f"{model.num_attention_heads} heads, feed-forward {model.ff_hidden_size}, vocabulary {model.vocab_size}"
        f"{', ' + family_text if family_text else ''}"
    )


def _stage_rows(config: Config, topology: Topology, bounds: Sequence[int], dtype: str) -> Iterator[tuple[str, str]]:
    """Yield one row per stage: layers, memory and activations."""
    num_stages = topology.pipe
    memory = stage_memory(config, topology, bounds, dtype)
    num_parameters = registry.costs_of(config).stage_parameters(
        bounds, topology.tensor, num_stages, config.parallel.placement
    )
    for stage in range(num_stages):
        activations_text = f"; {_activations_text(config, bounds, num_stages, stage)}" if num_stages > 1 else ""
        yield (
            f"stage {stage}",
            f"{stage_layers_text(config, bounds, num_stages, stage)}, {human_count(num_parameters[stage])} parameters "
            f"and about {human_bytes(memory[stage].total)} on each rank"
            f"{_host_text(memory[stage].host)}{activations_text}",
        )


def _layer_rows(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the row on the types of the layers of a decoder, if they are not all attention and feed-forward."""
    if is_hybrid(config.model):
        yield "layers", layer_counts_text(layer_types(config.model))


def layer_counts_text(types: Sequence[LayerType]) -> str:
    """Return the number of layers of each type as text, such as "3 gated-delta-net + mlp, 1 attention + mlp"."""
    return ", ".join(f"{count} {layer_type.label}" for layer_type, count in Counter(types).items())


def _expert_rows(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the row on expert count and placement."""
    model, num_ranks = config.model, config.parallel.expert_model_parallel_size
    if not model.num_experts:
        return
    layers = sum(layer_type.feed_forward == EXPERTS for layer_type in layer_types(model))
    placement_text = (
        f"; {model.num_experts // num_ranks} per layer on each of {num_ranks} ranks" if num_ranks > 1 else ""
    )
    if config.parallel.has_fewer_expert_shards:
        t, etp = config.parallel.model_parallel_size, config.parallel.expert_shards
        placement_text += f"; each is sharded over {etp} of {t} tensor ranks"
    yield (
        "experts",
        f"{model.num_experts} in each of {layers} layers, {model.moe_router_topk} per token{placement_text}; memory "
        "assumes an even load",
    )


def _context_rows(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the row on the split of sequences over ranks, and attention communication."""
    parallel, length = config.parallel, config.sequence_lengths[0]
    context_size = parallel.context_parallel_size
    if context_size == 1:
        return
    gathered = "latents" if config.model.multi_latent_attention else "keys and values"
    communication = f"in attention, {gathered} are gathered, and their gradients are summed"
    types = parallel.cp_comm_type.split()
    if parallel.cp_comm_by_layer == ALL_TO_ALL:
        communication = "in attention, an all-to-all moves each head to one rank and back"
    elif parallel.cp_comm_by_layer == HIERARCHICAL:
        inner, outer = parallel.hierarchical_sizes
        communication = (
            f"in attention, an all-to-all moves each head to one of {inner} ranks and back, and {gathered} of {outer} "
            "such groups are gathered"
        )
    elif len(set(types)) > 1:
        counts = ", ".join(f"{count} x {comm_type}" for comm_type, count in Counter(types).items())
        communication = f"attention communicates by layer: {counts}"
    elif P2P in types:
        communication = f"{communication}, also with --cp-comm-type p2p"
    if recurrent_mixers(config.model):
        communication += "; recurrent mixers exchange the states at the ends of chunks"
    yield (
        "context",
        f"2 chunks of {length // (2 * context_size)} tokens on each of {context_size} ranks; {communication}",
    )


def _zero_rows(config: Config, replicas: int) -> Iterator[tuple[str, str]]:
    """Yield rows on state sharded over replicas (ZeRO) and on state offloaded to the CPU."""
    settings = config.optimizer
    sharded = ["main params and optimizer states", "gradients", "weights (gathered per layer)"][: settings.zero_stage]
    if sharded and replicas > 1:
        names = ", ".join(sharded[:-1]) + (" and " if len(sharded) > 1 else "") + sharded[-1]
        parallel, (num_ranks, _) = config.parallel, config.expert_sizes
        copies_per_replica = parallel.model_parallel_size // parallel.expert_shards if config.model.num_experts else 1
        expert_replicas = replicas * copies_per_replica // num_ranks
        experts_text = ""
        if expert_replicas == 1:
            experts_text = "; each expert is on one replica, which shards nothing of it"
        elif num_ranks > 1 or copies_per_replica > 1:
            holders = "ranks" if copies_per_replica > 1 else "replicas"
            experts_text = f"; {expert_replicas} {holders} share those of each expert"
        yield "ZeRO", f"stage {settings.zero_stage}: {replicas} replicas share {names}{experts_text}"
    states = f"main params and optimizer states, updated there by {settings.cpu_adam}'s AdamW"
    if settings.is_muon:
        states = (
            f"main params and optimizer states, updated there except for Newton-Schulz; {settings.cpu_adam}'s AdamW"
        )
    elif settings.optimizer != "adamw":
        states = "main params and optimizer states, updated there"
    offloaded = [states] * settings.offload_optimizer + ["weights"] * settings.offload_parameters
    if offloaded:
        yield "on the CPU", "; ".join(offloaded)


def _host_text(num_bytes: int) -> str:
    return f", {human_bytes(num_bytes)} on the CPU" if num_bytes else ""


def _pipeline_rows(
    config: Config, num_stages: int, bounds: Sequence[int], forecast: BubbleForecast | None, is_known_model: bool
) -> Iterator[tuple[str, str]]:
    """Yield rows on the schedule and the expected pipeline bubble."""
    schedule, chunks, placement, _ = schedule_args(config, bounds, num_stages).values()
    num_micro_batches, method = config.batch.gas, config.parallel.partition_method
    v_text = " in a V" if placement == V else ""
    chunks_text = f", {chunks} chunks on each stage{v_text}" if chunks > 1 else ""
    candidates_text = f" of {', '.join(candidate_schedules(schedule, chunks, placement))}" if is_auto(schedule) else ""
    schedule_text = AUTO if candidates_text else schedule_path(schedule) or schedule
    yield "pipeline", f"schedule {schedule_text}{candidates_text}{chunks_text}"
    if forecast is None and method != "balanced":
        yield (
            "partition",
            f"--partition-method {method} splits the model at the start; the stages above are the balanced ones",
        )
    costs = registry.costs_of(config).chunk_costs(bounds) if is_known_model else None
    idle_share, qualifier = forecast or bubble, "" if forecast else "about "
    bubbles = []
    for name in candidate_schedules(schedule, chunks, placement):
        idle_percent, balanced_idle_percent = (
            100 * idle_share(num_stages, num_micro_batches, name, chunks, assumed_costs)
            for assumed_costs in (costs, None)
        )
        bubble_text = (
            f"{qualifier}{idle_percent:.1f} % expected, {balanced_idle_percent:.1f} % with equal stages"
            if is_known_model
            else (f"{balanced_idle_percent:.1f} % with equal stages")
        )
        bubbles.append(f"{name}: {bubble_text}" if is_auto(schedule) else bubble_text)
    note = " (fewer micro-batches than stages: raise --gas)" if num_micro_batches < num_stages else ""
    yield "pipeline bubble", "; ".join(bubbles) + note


def layers_text(bounds: Sequence[int], num_stages: int, stage: int, placement: str) -> str:
    """Format the layers on a stage, chunk by chunk: "0-2 and 6-8"."""
    return " and ".join(_range_text(start, stop) for start, stop in chunks_on(bounds, num_stages, stage, placement))


def encoder_decoder_layers_text(
    bounds: Sequence[int], num_stages: int, stage: int, placement: str, t5_config: Any
) -> str:
    """Format the encoder and decoder layers on a T5 stage, by chunk: "encoder 0-3 and decoder 0".

    Args:
        bounds: bounds in units: embedding, layers and norm on each side, and the head.
        t5_config: T5's configuration section with the layer counts of both sides.
    """
    units, texts = t5_units(t5_config.enc_layers, t5_config.dec_layers), []
    for start, stop in chunks_on(bounds, num_stages, stage, placement):
        for side, layers in (("encoder", units.enc_layers), ("decoder", units.dec_layers)):
            begin, end = max(start - layers.start, 0), min(stop - layers.start, len(layers))
            if begin < end:
                texts.append(f"{side} {_range_text(begin, end)}")
    return " and ".join(texts)


def stage_layers_text(config: Config, bounds: Sequence[int], num_stages: int, stage: int) -> str:
    """Format the layers on a stage."""
    if config.family_config.is_encoder_decoder:
        return encoder_decoder_layers_text(bounds, num_stages, stage, config.parallel.placement, config.family_config)
    layers = layers_text(bounds, num_stages, stage, config.parallel.placement)
    text = f"layers {layers} of {registry.costs_of(config).num_units}"
    if num_stages == 1 or not is_hybrid(config.model):
        return text
    unit_ranges = chunks_on(bounds, num_stages, stage, config.parallel.placement)
    types = layer_types(config.model)
    stage_units = [unit for start, stop in unit_ranges for unit in range(start, stop)]
    stage_types = [types[unit - 1] for unit in stage_units if 0 < unit <= len(types)]
    return f"{text} ({layer_counts_text(stage_types)})"


def _range_text(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def _activations_text(config: Config, bounds: Sequence[int], num_stages: int, stage: int) -> str:
    """Describe how many micro-batches' activations a stage stores at the same time."""
    schedule, chunks, *placement_args = schedule_args(config, bounds, num_stages).values()
    num_in_flight = in_flight(num_stages, config.batch.gas, schedule, chunks, stage, *placement_args)
    total = f"{config.batch.gas} x {chunks} forwards" if chunks > 1 else f"{config.batch.gas} micro-batches"
    return f"stores the activations of {num_in_flight} of {total}"
