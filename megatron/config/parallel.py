"""ParallelConfig: distribution over processes and devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from megatron import accelerators
from megatron.config.option import option
from megatron.config.pipeline_layout import parse_layout
from tds.schedule import LOOP, PLACEMENTS, FileSchedule, Placement, V, read_schedule
from tds.schedule.simulate import (
    AUTO,
    FILE_PREFIX,
    MANY_CHUNKS,
    ONE_CHUNK,
    SCHEDULES,
    V_SCHEDULES,
    auto_schedule_of,
    candidate_schedules,
    default_schedule,
    has_split_backwards,
    is_auto,
    placement_for,
)

ALL_GATHER, ALL_TO_ALL, P2P, HIERARCHICAL = "all_gather", "a2a", "p2p", "a2a+p2p"
"""Communication of attention over context ranks."""
PARTITION_METHODS = ("balanced", "uniform", "parameters", "profile")
STEP_TIMEOUT_S = 60
"""Seconds without progress in a step after which a rank ends the job; the first step has a longer limit."""


TRACE_IN_RUN = "<run folder>/trace"
"""Value of --pipeline-trace without a folder, until the run folder is known."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the tensor, pipe and context axes, the pipeline schedule, and the device."""

    model_parallel_size: int = option(
        1,
        "tensor-parallel size t",
        minimum=1,
        aliases=("--tensor-model-parallel-size",),
        short="tensor-parallel size t",
    )
    sequence_parallel: bool = option(
        False,
        "shard the activations between tensor-parallel layers along the sequence over the tensor ranks; the inputs "
        "of the layers stay unsharded with --pipeline-schedule zb-h1 or --compile",
        short="also shard activations along the sequence",
    )
    pipe_parallel_size: int = option(
        0,
        "number of pipeline stages p; 0 or 1: no pipeline",
        minimum=0,
        aliases=("--pipeline-model-parallel-size",),
        short="pipeline stages p; 0 or 1: no pipeline",
    )
    context_parallel_size: int = option(
        1,
        "context-parallel size c: sequences are sharded over c ranks, two chunks each to balance causal attention; "
        "losses equal those of one rank",
        minimum=1,
        short="context-parallel size c",
    )
    cp_comm_type: str = option(
        "all_gather",
        "communication of attention over context ranks: all_gather: keys and values; a2a: all tokens of a head to "
        "one rank, if c divides the heads of a tensor rank; p2p (Megatron's ring): the same as all_gather here; "
        "a2a+p2p: a2a within groups of the first of --hierarchical-context-parallel-sizes ranks, p2p between them. One "
        "type for all layers, or one for each layer",
        choices=(ALL_GATHER, ALL_TO_ALL, P2P, HIERARCHICAL),
        join=" ".join,
        is_list=True,
    )
    hierarchical_context_parallel_sizes: str = option(
        "",
        "with --cp-comm-type a2a+p2p: two sizes with the product --context-parallel-size: of the groups of consecutive "
        "context ranks that exchange heads, and of the groups over which keys and values are gathered",
        join=" ".join,
    )
    expert_model_parallel_size: int = option(
        1,
        "expert-parallel size: number of groups of ranks that the experts of a layer are distributed over; must divide "
        "data x context x tensor size / --expert-tensor-parallel-size",
        minimum=1,
    )
    expert_tensor_parallel_size: int = option(
        0,
        "number of tensor ranks that shard each expert, a divisor of the tensor-parallel size; if it is smaller, each "
        "group of this many ranks applies its experts to its shard of the sequence (needs --sequence-parallel)",
        minimum=1,
        shown_default="model-parallel-size",
    )
    pipeline_schedule: str | None = option(
        None,
        "pipeline schedule; auto: measure the candidates in the first steps and keep the fastest, with the chunks "
        "and placement that are fastest in simulation and fit in memory, unless flags set these",
        choices=SCHEDULES,
        constants={"--enable-zbh1-pipeline": "zb-h1"},
        shown_default="1f1b; interleaved with more than 1 chunk, zb-v in a V",
        short="1f1b, interleaved, zb-v, auto and more",
    )
    pipeline_auto_schedules: str | None = option(
        None,
        "candidates of --pipeline-schedule auto, such as 1f1b,zb-h1",
        shown_default="all that fit the memory",
    )
    pipeline_chunks: int = option(
        1,
        "number of model chunks per stage; more than 1 reduces the pipeline bubble and increases communication",
        minimum=1,
        aliases=("--num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-model-parallel-size"),
        shown_default="1; 2 in a V",
    )
    pipeline_placement: str | None = option(
        None,
        "placement of chunks on the stages: loop: from the first to the last stage, repeatedly; v: down and back "
        "up, so that the first stage also computes the loss",
        choices=PLACEMENTS,
        shown_default="v for zb-v and dualpipev, else loop",
    )
    pipeline_schedule_file: str | None = option(
        None,
        "CSV file with a schedule in torch's compute-only format (0F0,0B0,1I2,1W2) for this number of stages and "
        "micro-batches; it is proven to complete before the run starts",
        shown_default="none",
    )
    micro_batch_group_size: int = option(
        0,
        "with more than 1 chunk in a loop: number of micro-batches that run through a chunk before the next chunk",
        minimum=1,
        flag="--microbatch-group-size-per-virtual-pipeline-stage",
        shown_default="the number of stages",
    )
    pipeline_layout: str | None = option(
        None,
        "layers of each model chunk in Megatron's notation: E embedding, t layer, m multi-token prediction layer, L "
        "head, | next chunk, *n repetition: Et*3|(tt|)*2t|L; replaces --partition-method and --pipeline-chunks",
        flag="--pipeline-model-parallel-layout",
        shown_default="layers are assigned by --partition-method",
    )
    layers_per_chunk: int = option(
        0,
        "Megatron's form of --pipeline-chunks, which is layers / (stages x this); layers are still assigned by "
        "--partition-method",
        flag="--num-layers-per-virtual-pipeline-stage",
        minimum=1,
        shown_default="set by --pipeline-chunks",
    )
    pipeline_trace: str | None = option(
        None,
        "folder for a Perfetto trace of the first pipeline steps; without a value the folder trace in the run "
        "folder, which also gets a plot, schedule.png",
        shown_default="none",
        alone=TRACE_IN_RUN,
    )
    check_data_agreement: bool = option(
        False,
        "compare checksums of the data of the first and the last stage before each update; a difference ends the "
        "run with code 2",
    )
    overlap_grad_reduce: bool = option(
        True,
        "all-reduce gradients in buckets during the last backward of a step instead of after it; the results are "
        "the same",
        flag="",
        constants={"--overlap-grad-reduce": True, "--no-overlap-grad-reduce": False},
    )
    gradient_accumulation_fusion: bool | None = option(
        None,
        "accumulate weight gradients inside the matrix products of linear layers: less memory, slightly faster; "
        "the rounding changes the last bits of losses. Not supported with --zero-stage 2 and 3 and with --compile",
        constants={"--no-gradient-accumulation-fusion": False},
        shown_default="on for CUDA with --zero-stage 0 or 1 and without --compile, otherwise off",
    )
    reduce_bucket_size: int = option(
        0,
        "number of elements per bucket of the gradient all-reduce; with gloo and three or more replicas the size "
        "changes the rounding",
        minimum=1,
        maximum=10**12,
        aliases=("--ddp-bucket-size",),
        shown_default="on a device with ZeRO 0 and 1 the larger of 40,000,000 and 1,000,000 x replicas, else 32 MiB",
    )
    allgather_bucket_size: int = option(
        0,
        "number of elements per bucket of the all-gather of updated weights with ZeRO 1 and 2",
        minimum=1,
        maximum=10**12,
        shown_default="on a device the larger of 40,000,000 and 1,000,000 x replicas, on a CPU 32 MiB",
    )
    stage3_prefetch_bucket_size: int = option(
        50_000_000,
        "with --zero-stage 3: 0 gathers the weights of a layer when they are needed, any other value prefetches "
        "those of the next layer; the results are the same",
        minimum=0,
    )
    checkpoint_activations: bool = option(
        False,
        "activation recomputation: save only the inputs of layers in the forward and recompute the rest in the "
        "backward",
        short="recompute layers in the backward",
    )
    checkpoint_num_layers: int = option(
        1,
        "number of layers per recomputed block",
        minimum=1,
        aliases=("--recompute-num-layers", "--activations-checkpoint-num-layers"),
    )
    recompute_granularity: str | None = option(
        None,
        "full: same as --checkpoint-activations; selective: recompute only the attention core, between query, key, "
        "value and output",
        choices=("full", "selective"),
        constants={"--recompute-activations": "selective"},
        shown_default="none",
    )
    partition_activations: bool = option(
        False,
        "shard the saved inputs of recomputed layers over the tensor ranks",
        aliases=("--distribute-checkpointed-activations", "--distribute-saved-activations"),
    )
    checkpoint_in_cpu: bool = option(False, "save the inputs of recomputed layers in host memory")
    contiguous_checkpointing: bool = option(
        False,
        "save the inputs of recomputed layers in one buffer, which the first forward allocates",
        flag="--contigious-checkpointing",
        aliases=("--contiguous-checkpointing",),
    )
    compile: bool = option(False, "compile each transformer layer with torch.compile")
    partition_method: str = option(
        "balanced",
        "assignment of layers to stages: balanced (by estimated cost), profile (by times measured at the start), "
        "uniform, parameters, or type:REGEX of layer names",
    )
    device: str = option("auto", "device: auto, cpu, cuda, or the device of a plug-in (docs/accelerators.md)")
    fused_kernels: str = option(
        "auto",
        "fused operations on a GPU: auto: torch's kernels, and Triton's for dropout, rotary positions, gated "
        "activations, norms and the loss; torch: only torch's kernels; apex: as auto, with apex's norms and AdamW",
        choices=("auto", "torch", "apex"),
    )
    distributed_backend: str | None = option(
        None,
        "backend of torch.distributed; gloo on a GPU communicates through host memory: correct, but slow",
        choices=("nccl", "gloo"),
        shown_default="nccl on GPUs, gloo on CPU",
    )
    step_timeout: int = option(
        0,
        "seconds without progress in a step until all ranks exit with code 4 and name the stuck rank",
        minimum=1,
        shown_default="60",
        aliases=("--distributed-timeout-s", "--distributed-timeout-seconds-after-init"),
    )
    phase_timeout_minutes: float = option(
        30.0,
        "the same limit in minutes for rendezvous, opening data, loading, saving, evaluation and the first step",
        above=0,
    )

    def __post_init__(self) -> None:
        if self.recompute_granularity == "full":
            object.__setattr__(self, "checkpoint_activations", True)

    @property
    def num_stages(self) -> int:
        """p; sizes 0 and 1 both mean one stage."""
        return max(self.pipe_parallel_size, 1)

    @property
    def expert_shards(self) -> int:
        """Number of tensor ranks over which each expert is sharded."""
        return self.expert_tensor_parallel_size or self.model_parallel_size

    @property
    def cp_comm_by_layer(self) -> str | tuple[str, ...]:
        """Communication of attention over context ranks: one type for all layers, or a type for each layer."""
        types = tuple(self.cp_comm_type.split())
        return types[0] if len(set(types)) == 1 else types

    @property
    def hierarchical_sizes(self) -> tuple[int, ...]:
        """The numbers in ``hierarchical_context_parallel_sizes`` ("2 4" or "[2 4]"); empty if any is not positive."""
        words = self.hierarchical_context_parallel_sizes.strip("[]").split()
        return tuple(map(int, words)) if all(word.isdecimal() and int(word) > 0 for word in words) else ()

    @property
    def context_inner(self) -> int:
        """Number of consecutive context ranks that exchange heads with a2a+p2p; 1 if no layer uses it."""
        is_used = HIERARCHICAL in self.cp_comm_type.split() and self.context_parallel_size > 1
        return self.hierarchical_sizes[0] if is_used and self.hierarchical_sizes else 1

    def head_ranks_of(self, comm_type: str) -> int:
        """Return the number of context ranks over which attention of ``comm_type`` distributes the heads."""
        return {ALL_TO_ALL: self.context_parallel_size, HIERARCHICAL: self.context_inner}.get(comm_type, 1)

    @property
    def has_fewer_expert_shards(self) -> bool:
        """True if experts are sharded over fewer tensor ranks than other layers."""
        return self.expert_shards < self.model_parallel_size

    @property
    def has_pipeline(self) -> bool:
        return self.pipe_parallel_size > 1

    @property
    def schedule(self) -> str:
        """Schedule according to the flags, or the default for the chunks and their placement."""
        if self.pipeline_schedule_file is not None:
            return FILE_PREFIX + self.pipeline_schedule_file
        if self.pipeline_schedule == AUTO and self.pipeline_auto_schedules:
            return auto_schedule_of(self.auto_schedules)
        return self.pipeline_schedule or default_schedule(self.chunks, self.placement)

    @property
    def auto_schedules(self) -> list[str]:
        """Schedules from which "auto" may choose; empty for all."""
        return [name.strip() for name in (self.pipeline_auto_schedules or "").split(",") if name.strip()]

    @property
    def placement(self) -> str:
        """Chunk placement on the stages according to the flags, or the schedule's default."""
        if not self.has_pipeline:
            return LOOP
        if (file_schedule := self._file_schedule) is not None:
            return file_schedule.placement.style
        if self.auto_schedules and set(self.auto_schedules) <= set(V_SCHEDULES):
            return self.pipeline_placement or V
        return self.pipeline_placement or placement_for(self.pipeline_schedule)

    @property
    def chunks(self) -> int:
        """c, the chunk count per stage; 1 without a pipeline."""
        if not self.has_pipeline:
            return 1
        if (file_schedule := self._file_schedule) is not None:
            return file_schedule.placement.num_chunks
        if self.pipeline_layout is not None:
            with suppress(ValueError):  # reported by problems()
                return max(len(parse_layout(self.pipeline_layout)) // self.num_stages, 1)
        return max(self.pipeline_chunks, 2 if self.placement == V else 1)

    @property
    def group_size(self) -> int:
        """Micro-batches that one chunk runs before the next chunk; 0 for the stage count.

        It is always 0 with one chunk per stage, or with a placement other than ``LOOP``.
        """
        return self.micro_batch_group_size if self.chunks > 1 and self.placement == LOOP else 0

    @property
    def _file_schedule(self) -> FileSchedule | None:
        """Order in --pipeline-schedule-file; None without a valid file, which problems() reports."""
        if self.pipeline_schedule_file is not None:
            with suppress(OSError, ValueError):
                return read_schedule(self.pipeline_schedule_file)
        return None

    @property
    def loss_stage(self) -> int:
        """Stage that computes the loss."""
        return Placement(self.num_stages, self.chunks, self.placement).last_stage

    def data_parallel_size(self, world_size: int) -> int:
        """Compute d: ``world_size`` divided by the tensor, pipe and context sizes."""
        return world_size // self.replica_size

    @property
    def replica_size(self) -> int:
        """Number of ranks that work on the same samples: t p c."""
        return self.model_parallel_size * self.num_stages * self.context_parallel_size

    @property
    def step_timeout_s(self) -> int:
        """Seconds without progress in a step before a timeout."""
        return self.step_timeout or STEP_TIMEOUT_S

    @property
    def phase_timeout_s(self) -> float:
        """Time limit in seconds for long phases: opening data, the first step, loading, saving and evaluation."""
        return 60.0 * self.phase_timeout_minutes

    def problems(self) -> Iterator[str]:
        """Yield an error message for each invalid value in this section."""
        if unknown := accelerators.problem(self.device):
            yield unknown
        method = self.partition_method
        if method.startswith("type:"):
            try:
                re.compile(method[5:])
            except re.error as error:
                yield f"--partition-method type:REGEX needs a regular expression, got {method!r}: {error}"
        elif method not in PARTITION_METHODS:
            yield f"--partition-method must be one of {', '.join(PARTITION_METHODS)}, or type:REGEX, got {method!r}"
        if self.has_pipeline and (problem := self._file_problem() or self._layout_problem()):
            yield problem
            return  # the checks below need valid chunks
        if self.has_pipeline:
            yield from self._schedule_problems()
        if self.checkpoint_activations and self.recompute_granularity == "selective":
            yield (
                "--checkpoint-activations recomputes full layers and excludes --recompute-granularity selective, got "
                "both. Remove one of them"
            )
        if self.compile and self.gradient_accumulation_fusion:
            yield (
                "--gradient-accumulation-fusion accumulates gradients during the backward of a layer, which --compile "
                "does not support. Remove one of them"
            )
        is_valid = self.has_pipeline and self._auto_problem() is None
        names = candidate_schedules(self.schedule, self.chunks, self.placement) if is_valid else ()
        if self.compile and (split_schedules := [name for name in names if has_split_backwards(name)]):
            yield (
                f"--compile needs a schedule with unsplit backward passes, got --pipeline-schedule {self.schedule}: "
                f"{split_schedules[0]} defers weight gradients, but a compiled layer computes them together with the "
                f"input gradient. Use --pipeline-schedule {default_schedule(self.pipeline_chunks)}, or remove --compile"
            )

    def _file_problem(self) -> str | None:
        """Find conflicts between the schedule file and this section; None if there are none."""
        if self.pipeline_schedule_file is None:
            return None
        exclusive = {
            "--pipeline-schedule": self.pipeline_schedule is not None,
            "--pipeline-auto-schedules": self.pipeline_auto_schedules is not None,
            "--pipeline-chunks": self.pipeline_chunks > 1,
            "--pipeline-placement": self.pipeline_placement is not None,
            "--microbatch-group-size-per-virtual-pipeline-stage": bool(self.micro_batch_group_size),
        }
        if flags := [flag for flag, is_set in exclusive.items() if is_set]:
            return (
                f"--pipeline-schedule-file determines the placement and order of the chunks, got {', '.join(flags)} "
                "too. Remove one of them"
            )
        try:
            stages = read_schedule(self.pipeline_schedule_file).placement.num_stages
        except (OSError, ValueError) as error:
            return f"--pipeline-schedule-file must contain a valid schedule: {error}"
        if stages != self.num_stages:
            return (
                f"--pipeline-schedule-file must match --pipe-parallel-size {self.num_stages}, got "
                f"{self.pipeline_schedule_file} with {stages} stages. Use --pipe-parallel-size {stages}, or another "
                "file"
            )
        return None

    def _layout_problem(self) -> str | None:
        """Explain why a layout in Megatron's notation is invalid; None if it is valid. Ignores the layer count."""
        if self.pipeline_layout is None:
            return None
        exclusive = {
            "--pipeline-chunks": self.pipeline_chunks > 1,
            "--num-layers-per-virtual-pipeline-stage": bool(self.layers_per_chunk),
            "--partition-method": self.partition_method != "balanced",
        }
        if flags := [flag for flag, is_set in exclusive.items() if is_set]:
            return (
                f"--pipeline-model-parallel-layout determines the chunks, got {', '.join(flags)} too. Remove one of "
                "them"
            )
        try:
            num_chunks = len(parse_layout(self.pipeline_layout))
        except ValueError as error:
            return str(error)
        if num_chunks % self.num_stages:
            return (
                "--pipeline-model-parallel-layout must have a multiple of --pipe-parallel-size chunks, got "
                f"{num_chunks} and {self.num_stages} in {self.pipeline_layout!r}"
            )
        return None

    def _auto_problem(self) -> str | None:
        """Explain why "auto" cannot choose among the named schedules; None if it can."""
        flag, names = "--pipeline-auto-schedules", self.pipeline_auto_schedules
        if names is None:
            return None
        possible = candidate_schedules(AUTO, self.chunks, self.placement)
        if self.pipeline_schedule != AUTO:
            return f"{flag} needs --pipeline-schedule auto, got {flag} {names} and {self.schedule}. Remove one of them"
        known = [name for name in SCHEDULES if name != AUTO]
        if not self.auto_schedules or not set(self.auto_schedules) <= set(known):
            return f"{flag} must be a comma-separated list of {', '.join(known)}, got {flag} {names}"
        if not set(self.auto_schedules) & set(possible):
            return (
                f"{flag} must name at least one of {', '.join(possible)}, which support these chunks, got {flag} "
                f"{names}. Name others, or change --pipeline-chunks and --pipeline-placement"
            )
        return None

    def _schedule_problems(self) -> Iterator[str]:
        if self.pipeline_schedule_file is not None:
            return
        if problem := self._auto_problem():
            yield problem
            return
        schedule, chunks = self.schedule, self.chunks
        got = f"got --pipeline-schedule {schedule}, --pipeline-chunks {chunks}"
        if (self.placement == V) != (schedule in V_SCHEDULES) and (self.placement == V or not is_auto(schedule)):
            required_placement = V if schedule in V_SCHEDULES else LOOP
            if not is_auto(schedule):
                yield (
                    f"--pipeline-schedule {schedule} needs --pipeline-placement {required_placement}, {got}, "
                    f"--pipeline-placement {self.placement}. Remove one of the flags"
                )
            return
        if 0 < self.group_size < self.num_stages:
            yield (
                "--microbatch-group-size-per-virtual-pipeline-stage must be at least --pipe-parallel-size, got "
                f"{self.group_size} and {self.num_stages}"
            )
        if self.placement == V:
            if chunks != 2:
                yield (
                    f"--pipeline-placement v needs 2 chunks per stage, {got}. Use --pipeline-chunks 2, or remove "
                    "--pipeline-chunks"
                )
            return
        if chunks == 1 and schedule not in ONE_CHUNK and not is_auto(schedule):
            yield f"--pipeline-schedule {schedule} needs several chunks per stage, {got}. Use --pipeline-chunks 2"
        if chunks > 1 and schedule not in MANY_CHUNKS and not is_auto(schedule):
            yield (
                f"several chunks per stage need --pipeline-schedule {' or '.join(MANY_CHUNKS)}, {got}. Remove one of "
                "the two flags"
            )
