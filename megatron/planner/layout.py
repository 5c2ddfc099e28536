"""Layouts, the flags and variables that select a layout, and the training program's checks of a layout."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Any

from megatron.arguments.flag_values import all_options, scan
from megatron.arguments.validate import find_problems
from megatron.config.option import Option
from megatron.costs import memory
from megatron.costs.memory import SavedActivations
from megatron.models.registry import FAMILIES
from megatron.mpu.topology import Coordinate, Topology
from tds.schedule import Placement
from tds.schedule.simulate import V_SCHEDULES, bubble, candidate_schedules, default_schedule, placement_for

# A layout: one way to distribute a model over a machine.

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Axis sizes, micro-batches, pipeline schedule, and options for sharding, recomputation and offloading.

    Args:
        context: ranks that sequences are split over.
        expert, expert_tensor: ranks that share a layer's experts, and tensor ranks that shard each expert, see
            ``Topology``.
        recompute: "none", "selective" (the attention core), "full" (each layer from its input).
        sequence_parallel: tokens are split over the tensor ranks between the matmuls.
        num_bf16_states, num_8bit_states: number of AdamW states (of two) stored in bf16 and in 8 bits.
        overlap_grad_reduce: gradients are all-reduced over the replicas during the last backward.
        overlaps_tensor: activation gradients are all-reduced over the tensor ranks while weight gradients are computed.
        is_compiled: each layer is compiled.
    """

    tensor: int = 1
    pipe: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 0
    chunks: int = 1
    schedule: str = "1f1b"
    micro_batch_size: int = 1
    num_micro_batches: int = 1
    recompute: str = "none"
    zero_stage: int = 0
    sequence_parallel: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    waiting: SavedActivations = SavedActivations()  # noqa: RUF009 - frozen
    dtype: str = "bf16"
    optimizer: str = "adamw"
    num_bf16_states: int = 0
    num_8bit_states: int = 0
    overlap_grad_reduce: bool = True
    overlaps_tensor: bool = True
    is_compiled: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipe * self.data * self.context

    @property
    def topology(self) -> Topology:
        """The rank grid, in global rank order."""
        return Topology(
            pipe=self.pipe,
            data=self.data,
            tensor=self.tensor,
            context=self.context,
            expert=self.expert,
            expert_tensor=self.expert_shards,
        )

    def stride(self, axis: str) -> int:
        """Return the distance between neighbours along ``axis`` (one of ``topology.AXES``), in global ranks."""
        neighbour = {"pipe": 0, "data": 0, "context": 0, "tensor": 0, axis: 1}
        return self.topology.rank(Coordinate(**neighbour))

    @property
    def placement(self) -> Placement:
        """Assignment of virtual stages to stages."""
        return Placement(self.pipe, self.chunks, self.lies)

    @property
    def lies(self) -> str:
        """Name of the chunk placement that the schedule requires."""
        return placement_for(self.schedule)

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all replicas."""
        return self.micro_batch_size * self.num_micro_batches * self.data

    @property
    def expert_shards(self) -> int:
        """Number of tensor ranks over which an expert is sharded."""
        return min(self.expert_tensor or self.tensor, self.tensor)

    @property
    def expert_replicas(self) -> int:
        """Number of ranks with the same shard of the same experts."""
        return self.topology.expert_copies

    @property
    def state_bytes(self) -> memory.State:
        """Bytes per parameter of weights, gradients and optimizer states."""
        return memory.State.for_optimizer(self.dtype, self.optimizer, self.num_bf16_states, self.num_8bit_states)

    @property
    def zero(self) -> memory.Zero:
        """ZeRO sharding and offloading over the replicas."""
        return memory.Zero(self.zero_stage, self.data * self.context, self.offload_optimizer, self.offload_parameters)

    @property
    def sequence(self) -> int:
        """Number of tensor ranks that tokens are split over between the matmuls."""
        return self.tensor if self.sequence_parallel else 1

    def __str__(self) -> str:
        words = [f"tp {self.tensor}", f"pp {self.pipe}", f"dp {self.data}"]
        words += [f"cp {self.context}"] * (self.context > 1)
        words += [f"ep {self.expert}"] * (self.expert > 1)
        if self.pipe > 1:
            words.append(self.schedule + (f" x {self.chunks} chunks" if self.chunks > 1 else ""))
        words.append(f"micro-batch {self.micro_batch_size} x {self.num_micro_batches}")
        words += [f"ZeRO {self.zero_stage}"] * bool(self.zero_stage)
        words += [f"recompute {self.recompute}"] * (self.recompute != "none")
        words += ["sequence parallel"] * self.sequence_parallel
        words += ["optimizer on the host"] * self.offload_optimizer
        words += ["weights on the host"] * self.offload_parameters
        return ", ".join(words)


def layout_of(config: Any, world_size: int) -> Layout:
    """Convert a ``Config`` to a layout on ``world_size`` ranks, with "auto" resolved to the least-bubble schedule."""
    parallel, optimizer, batch = config.parallel, config.optimizer, config.batch
    stages, chunks, m = parallel.num_stages, parallel.chunks, batch.num_micro_batches
    names = candidate_schedules(parallel.schedule, chunks, parallel.placement) if stages > 1 else ("1f1b",)
    recompute = "full" if parallel.checkpoint_activations else parallel.recompute_granularity or "none"
    return Layout(
        tensor=parallel.model_parallel_size,
        pipe=stages,
        data=parallel.data_parallel_size(world_size),
        context=parallel.context_parallel_size,
        expert=config.expert_sizes[0],
        expert_tensor=config.expert_sizes[1],
        chunks=chunks,
        schedule=min(names, key=lambda name: bubble(stages, m, name, chunks)),
        micro_batch_size=batch.micro_batch_size,
        num_micro_batches=m,
        recompute=recompute,
        zero_stage=optimizer.zero_stage,
        sequence_parallel=getattr(parallel, "sequence_parallel", False),
        offload_optimizer=optimizer.offload_optimizer,
        offload_parameters=optimizer.offload_parameters,
        waiting=memory.saved_activations_of(config),
        dtype=config.precision.dtype or "bf16",
        optimizer=optimizer.state_type,
        num_bf16_states=len(optimizer.bf16_states),
        num_8bit_states=len(optimizer.quantized_states),
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlaps_tensor=not parallel.compile,
        is_compiled=parallel.compile,
    )


# The command for a layout: the variables of a run script and its flags.

LAYOUT_FIELDS = {
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "enc_seq_length", "dec_seq_length",
    "model_parallel_size", "pipe_parallel_size", "pipeline_chunks", "pipeline_schedule", "pipeline_placement",
    "batch_size", "gas", "requested_global_batch_size", "zero_stage", "sequence_parallel", "checkpoint_activations",
    "recompute_granularity",
    "offload_optimizer", "offload_parameters", "dtype", "dry_run", "expert_model_parallel_size",
}  # fmt: skip
"""Config fields that are set by the run script's variables or by the layout's own flags."""


def script_variables(config: Any, layout: Layout, devices_per_node: int) -> dict[str, int]:
    """Return the run script's variables (name -> value). The layout must fit into one node or fill all nodes."""
    model, family, world = config.model, config.family_config, layout.world_size
    ranks_per_node = min(devices_per_node, world)
    lengths = {"SEQLEN": config.batch.seq_length}
    if family.is_encoder_decoder:
        lengths = {"ENC_SEQLEN": family.enc_seq_length, "DEC_SEQLEN": family.dec_seq_length}
    layers = (
        {} if family.is_encoder_decoder and family.enc_layers != family.dec_layers else {"NLAYERS": model.num_layers}
    )
    if family.is_encoder_decoder and family.enc_layers == family.dec_layers:
        layers = {"NLAYERS": family.enc_layers}
    values = vars(model) | vars(family)
    extra = {name: values[field] for name, field in FAMILIES[config.family].variables.items()}
    return {
        "GPUS_PER_NODE": ranks_per_node,
        "NNODES": world // ranks_per_node,
        "pp_size": layout.pipe,
        "mp_size": layout.tensor,
        **layers,
        "NHIDDEN": model.hidden_size,
        "NHEADS": model.num_attention_heads,
        **extra,
        **lengths,
        "BATCHSIZE": layout.micro_batch_size,
        "GAS": layout.num_micro_batches,
    }


def script_flags(config: Any, layout: Layout) -> list[str]:
    """Return the flags to append to the run script, for settings that have no variable."""
    words = [f"--{layout.dtype}"]
    if schedule := explicit_schedule(layout):
        words += ["--pipeline-schedule", schedule]
    if chunks := explicit_chunks(layout):
        words += ["--pipeline-chunks", str(chunks)]
    if layout.expert > 1:
        words += ["--expert-model-parallel-size", str(layout.expert)]
    if layout.zero_stage:
        words += ["--zero-stage", str(layout.zero_stage)]
    if layout.recompute == "full":
        words += ["--checkpoint-activations"]
    elif layout.recompute == "selective":
        words += ["--recompute-granularity", "selective"]
    words += ["--sequence-parallel"] * layout.sequence_parallel
    words += ["--offload-optimizer"] * layout.offload_optimizer
    words += ["--offload-parameters"] * layout.offload_parameters
    return words + user_flags(config)


def explicit_schedule(layout: Layout) -> str | None:
    """Return the schedule, or None if it is the default for the stage and chunk counts."""
    return layout.schedule if layout.pipe > 1 and layout.schedule != default_schedule(layout.chunks) else None


def explicit_chunks(layout: Layout) -> int | None:
    """Return the chunk count, or None if it follows from the schedule."""
    return layout.chunks if layout.chunks > 1 and layout.schedule not in V_SCHEDULES else None


def user_flags(config: Any) -> list[str]:
    """Return the user's flags that are not covered by the variables, the layout's flags or the family's recipe."""
    family = FAMILIES[config.family]
    excluded = LAYOUT_FIELDS | set(family.variables.values())
    if config.family_config.is_encoder_decoder and config.family_config.enc_layers == config.family_config.dec_layers:
        excluded |= {"enc_layers", "dec_layers"}
    recipe, words = scan(family.recipe, (), config.family).values, []
    sections = config.sections()
    for section, option in all_options():
        if section in sections and option.name in config.explicit_fields and option.name not in excluded:
            value = getattr(sections[section], option.name)
            if recipe.get(option.name) != value:
                words += _format_flag(option, value)
    return words


def _format_flag(option: Option, value: Any) -> list[str]:
    """Format the words that set ``option`` to ``value``."""
    constant_flags = [flag for flag, flag_value in option.constants.items() if flag_value == value]
    if constant_flags or value is True:
        return [constant_flags[0] if constant_flags else option.flag]
    return [] if value is False else [option.flag, str(value)]


def command_lines(config: Any, layout: Layout, devices_per_node: int) -> list[str]:
    """Format a shell command as lines: variables, and the run script with its flags."""
    assignments = [f"{name}={value}" for name, value in script_variables(config, layout, devices_per_node).items()]
    run_command = f"bash {FAMILIES[config.family].run_command} {shlex.join(script_flags(config, layout))}"
    return [" ".join(assignments[:4]) + " \\", "  " + " ".join(assignments[4:]) + " \\", "  " + run_command]


def config_file_settings(layout: Layout) -> tuple[dict[str, str | int], frozenset[str]]:
    """Convert ``layout`` to --config file keys; also return the fields that the file must not set."""
    settings: dict[str, str | int] = {
        "model-parallel-size": layout.tensor,
        "pipe-parallel-size": layout.pipe,
        "context-parallel-size": layout.context,
        "batch-size": layout.micro_batch_size,
        "gas": layout.num_micro_batches,
        "zero-stage": layout.zero_stage,
        "sequence-parallel": str(layout.sequence_parallel).lower(),
        "checkpoint-activations": str(layout.recompute == "full").lower(),
    }
    optional = {
        "pipeline_schedule": explicit_schedule(layout),
        "pipeline_chunks": explicit_chunks(layout),
        "recompute_granularity": "selective" if layout.recompute == "selective" else None,
        "expert_model_parallel_size": layout.expert if layout.expert > 1 else None,
        "pipeline_placement": None,
    }
    settings |= {field.replace("_", "-"): value for field, value in optional.items() if value is not None}
    return settings, frozenset(field for field, value in optional.items() if value is None)


# Check whether the training program accepts a layout, with its own checks of the resulting configuration.


def problems(config: Any, layout: Layout) -> list[str]:
    """Return the errors that the training program would report for ``config`` with ``layout``; empty if none."""
    return find_problems(with_layout(config, layout), layout.world_size)


def with_layout(config: Any, layout: Layout) -> Any:
    """Copy ``config`` with the sizes and settings of ``layout``, as ``command_lines`` sets them."""
    schedule, is_full = explicit_schedule(layout), layout.recompute == "full"
    parallel = replace(
        config.parallel,
        model_parallel_size=layout.tensor,
        pipe_parallel_size=layout.pipe,
        pipeline_chunks=explicit_chunks(layout) or 1,
        pipeline_schedule=schedule,
        pipeline_placement=None,
        expert_model_parallel_size=layout.expert,
        sequence_parallel=layout.sequence_parallel,
        checkpoint_activations=is_full,
        recompute_granularity="selective" if layout.recompute == "selective" else None,
    )
    optimizer = replace(
        config.optimizer,
        zero_stage=layout.zero_stage,
        offload_optimizer=layout.offload_optimizer,
        offload_parameters=layout.offload_parameters,
    )
    batch = replace(
        config.batch,
        batch_size=layout.micro_batch_size,
        gas=layout.num_micro_batches,
        requested_global_batch_size=0,
    )
    changed = {
        "pipeline_chunks": explicit_chunks(layout) is not None,
        "expert_model_parallel_size": layout.expert > 1,
        "pipeline_schedule": schedule is not None,
        "zero_stage": layout.zero_stage > 0,
        "checkpoint_activations": is_full,
        "recompute_granularity": layout.recompute == "selective",
        "sequence_parallel": layout.sequence_parallel,
        "offload_optimizer": layout.offload_optimizer,
        "offload_parameters": layout.offload_parameters,
    }
    given_fields = (
        *(name for name in config.explicit_fields if name not in LAYOUT_FIELDS),
        *(name for name, is_changed in changed.items() if is_changed),
    )
    return replace(
        config,
        parallel=parallel,
        optimizer=optimizer,
        batch=batch,
        precision=replace(config.precision, dtype=layout.dtype),
        run=replace(config.run, dry_run=True),
        explicit_fields=given_fields,
    )
