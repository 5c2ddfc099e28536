"""ParallelConfig: distribution of the model over processes and devices."""

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
    IN_A_V,
    IN_FILE,
    MANY_CHUNKS,
    ONE_CHUNK,
    SCHEDULES,
    auto_among,
    by_default,
    candidates,
    is_auto,
    placement_for,
    splits,
)

METHODS = ("balanced", "uniform", "parameters", "profile")
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
        "between the tensor-parallel products each tensor rank keeps its part of the sequence of hidden states, 1/t; "
        "what the products read stays whole with --pipeline-schedule zb-h1 or --compile",
        short="cut hidden states along the sequence, too",
    )
    pipe_parallel_size: int = option(
        0,
        "pipeline stages p; 0 or 1: no pipeline engine",
        minimum=0,
        aliases=("--pipeline-model-parallel-size",),
        short="pipeline stages p; 0 or 1: no pipeline",
    )
    context_parallel_size: int = option(
        1,
        "context-parallel size c: sequences are cut over c ranks, two pieces each, so that causal work is even; the "
        "losses are those of one rank",
        minimum=1,
        short="context-parallel size c",
    )
    cp_comm_type: str = option(
        "all_gather",
        "what attention sends over the context ranks: all_gather: keys and values; a2a: all of a head to one rank, "
        "where c divides the heads of a tensor rank; p2p, Megatron's ring, gathers here",
        choices=("all_gather", "a2a", "p2p"),
    )
    expert_model_parallel_size: int = option(
        1,
        "expert-parallel size: the experts of a layer are shared out over so many of the data x context ranks",
        minimum=1,
    )
    expert_tensor_parallel_size: int = option(
        0,
        "tensor ranks over which each expert is cut: all, or 1: each has whole experts for its part of the sequence",
        minimum=1,
        shown_default="model-parallel-size",
    )
    pipeline_schedule: str | None = option(
        None,
        "order of work in the pipeline; auto: the fastest one in the first steps, with the chunks and placement "
        "that are fastest by simulation among those that fit the memory, where no flag says how layers lie",
        choices=SCHEDULES,
        constants={"--enable-zbh1-pipeline": "zb-h1"},
        shown_default="1f1b; interleaved with more than 1 chunk, zb-v in a V",
        short="1f1b, interleaved, zb-v, auto and more",
    )
    pipeline_auto_schedules: str | None = option(
        None,
        "schedules among which --pipeline-schedule auto chooses, with commas: 1f1b,zb-h1",
        shown_default="all that fit the memory",
    )
    pipeline_chunks: int = option(
        1,
        "runs of layers that each stage holds; with more than 1 the pipeline fills and drains faster and sends more",
        minimum=1,
        aliases=("--num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-model-parallel-size"),
        shown_default="1; 2 in a V",
    )
    pipeline_placement: str | None = option(
        None,
        "how the chunks lie on the stages: loop: down the stages, then down again; v: down, then up, so that the first "
        "stage has the loss, too",
        choices=PLACEMENTS,
        shown_default="v for zb-v and dualpipev, else loop",
    )
    pipeline_schedule_file: str | None = option(
        None,
        "a CSV file with the order of work, in torch's compute-only form (0F0,0B0,1I2,1W2), for this number of stages "
        "and micro-batches; it is proven to run at the start",
        shown_default="none",
    )
    micro_batch_group_size: int = option(
        0,
        "with more than 1 chunk in a loop: micro-batches that go through one chunk before the next one's turn",
        minimum=1,
        flag="--microbatch-group-size-per-virtual-pipeline-stage",
        shown_default="the number of stages",
    )
    pipeline_layout: str | None = option(
        None,
        "Megatron's notation for the layers of each piece of the model: E embedding, t a layer, L the head, | between "
        "pieces, *n times: Et*3|(tt|)*2t|L; it takes the place of --partition-method and --pipeline-chunks",
        flag="--pipeline-model-parallel-layout",
        shown_default="layers are cut by --partition-method",
    )
    layers_per_chunk: int = option(
        0,
        "Megatron's way to say --pipeline-chunks: layers / (stages x this); --partition-method cuts all the same",
        flag="--num-layers-per-virtual-pipeline-stage",
        minimum=1,
        shown_default="--pipeline-chunks counts",
    )
    pipeline_trace: str | None = option(
        None,
        "folder for a trace of the pipeline's first steps, for Perfetto, without a value the folder trace in the run "
        "folder; the run folder gets its picture, schedule.png",
        shown_default="none",
        alone=TRACE_IN_RUN,
    )
    check_data_agreement: bool = option(
        False,
        "compare checksums of what the first and the last stage read in each step, ahead of the update; data that "
        "differ end the run with code 2",
    )
    overlap_grad_reduce: bool = option(
        True,
        "replicas add up their gradients in buckets while the last backward of a step runs, and not after it; the "
        "numbers are the same",
        flag="",
        constants={"--overlap-grad-reduce": True, "--no-overlap-grad-reduce": False},
    )
    gradient_accumulation_fusion: bool = option(
        False,
        "products of linear layers add the gradients of their weights to where these lie, and make none apart: less "
        "memory and a little less time; sums round once less, so that losses differ in their last bits. Not with "
        "--zero-stage 2 and 3, nor --compile",
        constants={"--no-gradient-accumulation-fusion": False},
    )
    reduce_bucket_size: int = option(
        0,
        "gradients that replicas add up together, in numbers; gloo rounds by places in a bucket, so that with three "
        "replicas or more another size gives other bits there",
        minimum=1,
        maximum=10**12,
        aliases=("--ddp-bucket-size",),
        shown_default="on a device with ZeRO 0 and 1 the larger of 40,000,000 and 1,000,000 x replicas, else 32 MiB",
    )
    allgather_bucket_size: int = option(
        0,
        "updated weights that replicas send each other together with ZeRO 1 and 2, in numbers",
        minimum=1,
        maximum=10**12,
        shown_default="on a device the larger of 40,000,000 and 1,000,000 x replicas, on a CPU 32 MiB",
    )
    stage3_prefetch_bucket_size: int = option(
        50_000_000,
        "with --zero-stage 3, 0 gathers the weights of each layer where they are needed, any other number those of the "
        "next layer ahead; the numbers are the same",
        minimum=0,
    )
    checkpoint_activations: bool = option(
        False,
        "keep only the inputs of layers in the forward pass and compute the rest again in the backward pass",
        short="recompute layers in the backward pass",
    )
    checkpoint_num_layers: int = option(
        1,
        "layers between two kept inputs",
        minimum=1,
        aliases=("--recompute-num-layers", "--activations-checkpoint-num-layers"),
    )
    recompute_granularity: str | None = option(
        None,
        "full: as --checkpoint-activations; selective: compute again what is between query, key, value and the output "
        "of each attention, and nothing else",
        choices=("full", "selective"),
        constants={"--recompute-activations": "selective"},
        shown_default="none",
    )
    partition_activations: bool = option(
        False,
        "keep of the inputs of recomputed layers a part on each tensor rank, 1/t of them",
        aliases=("--distribute-checkpointed-activations", "--distribute-saved-activations"),
    )
    checkpoint_in_cpu: bool = option(False, "keep the inputs of recomputed layers in the memory of the host")
    contiguous_checkpointing: bool = option(
        False,
        "keep the inputs of recomputed layers in one buffer, made at the first forward",
        flag="--contigious-checkpointing",
        aliases=("--contiguous-checkpointing",),
    )
    compile: bool = option(False, "compile each transformer layer with torch.compile")
    partition_method: str = option(
        "balanced",
        "layers per stage: balanced (by estimated cost), profile (by the time that each layer takes in a probe at the "
        "start), uniform, parameters, or type:REGEX of layer names",
    )
    device: str = option("auto", "where to compute: auto, cpu, cuda, or the device of a plug-in (docs/accelerators.md)")
    fused_kernels: str = option(
        "auto",
        "fused norms, AdamW and dropout on a GPU: torch's, or apex's norms and AdamW; auto: torch's, dropout by Triton",
        choices=("auto", "torch", "apex"),
    )
    distributed_backend: str | None = option(
        None,
        "backend of torch.distributed; gloo on a GPU goes through the host, for numbers only",
        choices=("nccl", "gloo"),
        shown_default="nccl on GPUs, gloo on CPU",
    )
    step_timeout: int = option(
        0,
        "seconds without progress in a step after which a rank is stuck: all ranks end with code 4 and name it",
        minimum=1,
        shown_default="60",
        aliases=("--distributed-timeout-s", "--distributed-timeout-seconds-after-init"),
    )
    phase_timeout_minutes: float = option(
        30.0,
        "the same limit, in minutes, while ranks meet, open data, load, save and evaluate, and in the first step",
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
    def cuts_experts(self) -> bool:
        """True if each expert is sharded over the tensor ranks."""
        return self.expert_tensor_parallel_size != 1

    @property
    def has_pipeline(self) -> bool:
        return self.pipe_parallel_size > 1

    @property
    def schedule(self) -> str:
        """Name of the schedule according to the flags, or the default for the chunks and their placement."""
        if self.pipeline_schedule_file is not None:
            return IN_FILE + self.pipeline_schedule_file
        if self.pipeline_schedule == AUTO and self.pipeline_auto_schedules:
            return auto_among(self.auto_schedules)
        return self.pipeline_schedule or by_default(self.chunks, self.placement)

    @property
    def auto_schedules(self) -> list[str]:
        """The schedules from which "auto" may choose; empty for all."""
        return [name.strip() for name in (self.pipeline_auto_schedules or "").split(",") if name.strip()]

    @property
    def placement(self) -> str:
        """Placement of the chunks on the stages according to the flags, or the default of the schedule."""
        if not self.has_pipeline:
            return LOOP
        if (file_schedule := self._order_in_file) is not None:
            return file_schedule.placement.kind
        if self.auto_schedules and set(self.auto_schedules) <= set(IN_A_V):
            return self.pipeline_placement or V
        return self.pipeline_placement or placement_for(self.pipeline_schedule)

    @property
    def chunks(self) -> int:
        """c, the number of chunks per stage; 1 without a pipeline."""
        if not self.has_pipeline:
            return 1
        if (file_schedule := self._order_in_file) is not None:
            return file_schedule.placement.num_chunks
        if self.pipeline_layout is not None:
            with suppress(ValueError):  # reported by problems()
                return max(len(parse_layout(self.pipeline_layout)) // self.num_stages, 1)
        return max(self.pipeline_chunks, 2 if self.placement == V else 1)

    @property
    def group_size(self) -> int:
        """Number of micro-batches that one chunk runs before the next chunk; 0 for the number of stages.

        It is always 0 with one chunk per stage, or with a placement other than ``LOOP``.
        """
        return self.micro_batch_group_size if self.chunks > 1 and self.placement == LOOP else 0

    @property
    def _order_in_file(self) -> FileSchedule | None:
        """The order of --pipeline-schedule-file; None without a valid file, which problems() reports."""
        if self.pipeline_schedule_file is not None:
            with suppress(OSError, ValueError):
                return read_schedule(self.pipeline_schedule_file)
        return None

    @property
    def loss_stage(self) -> int:
        """The stage that computes the loss."""
        return Placement(self.num_stages, self.chunks, self.placement).last_stage

    def data_parallel_size(self, world_size: int) -> int:
        """Return d: ``world_size`` divided by the sizes of the tensor, pipe and context axes."""
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
        """Limit in seconds for long phases: opening data, the first step, loading, saving and evaluation."""
        return 60.0 * self.phase_timeout_minutes

    def problems(self) -> Iterator[str]:
        """Yield the problems within this section."""
        if unknown := accelerators.problem(self.device):
            yield unknown
        method = self.partition_method
        if method.startswith("type:"):
            try:
                re.compile(method[5:])
            except re.error as error:
                yield f"--partition-method type:REGEX needs a regular expression, got {method!r}: {error}"
        elif method not in METHODS:
            yield f"--partition-method must be one of {', '.join(METHODS)}, or type:REGEX, got {method!r}"
        if self.has_pipeline and (problem := self._file_problem() or self._layout_problem()):
            yield problem
            return  # the checks below need valid chunks
        if self.has_pipeline:
            yield from self._schedule_problems()
        if self.checkpoint_activations and self.recompute_granularity == "selective":
            yield (
                "either whole layers are computed again or the attention in them, got --checkpoint-activations and "
                "--recompute-granularity selective. Leave one out"
            )
        if self.compile and self.gradient_accumulation_fusion:
            yield (
                "--gradient-accumulation-fusion adds to gradients within the backward of a layer, which a layer that "
                "--compile compiles does not do. Leave one of them out"
            )
        is_sound = self.has_pipeline and self._auto_problem() is None
        names = candidates(self.schedule, self.chunks, self.placement) if is_sound else ()
        if self.compile and (split := [name for name in names if splits(name)]):
            yield (
                f"--compile needs a schedule of whole backwards, got --pipeline-schedule {self.schedule}: {split[0]} "
                "puts the gradients of weights off, and a compiled layer computes them with that of its input. "
                f"Use --pipeline-schedule {by_default(self.pipeline_chunks)}, or leave --compile out"
            )

    def _file_problem(self) -> str | None:
        """Return the conflict of the schedule file with this section, or None."""
        if self.pipeline_schedule_file is None:
            return None
        exclusive = {
            "--pipeline-schedule": self.pipeline_schedule is not None,
            "--pipeline-auto-schedules": self.pipeline_auto_schedules is not None,
            "--pipeline-chunks": self.pipeline_chunks > 1,
            "--pipeline-placement": self.pipeline_placement is not None,
            "--microbatch-group-size-per-virtual-pipeline-stage": bool(self.micro_batch_group_size),
        }
        if flags := [flag for flag, is_said in exclusive.items() if is_said]:
            return f"--pipeline-schedule-file says how chunks lie and run, got {', '.join(flags)} too. Leave it out"
        try:
            stages = read_schedule(self.pipeline_schedule_file).placement.num_stages
        except (OSError, ValueError) as error:
            return f"--pipeline-schedule-file must hold an order that runs: {error}"
        if stages != self.num_stages:
            return (
                f"--pipeline-schedule-file must be for --pipe-parallel-size {self.num_stages}, got "
                f"{self.pipeline_schedule_file} of {stages} stages. Use --pipe-parallel-size {stages}, or another file"
            )
        return None

    def _layout_problem(self) -> str | None:
        """Return the problem of a layout in Megatron's notation, or None; the number of layers is checked elsewhere."""
        if self.pipeline_layout is None:
            return None
        exclusive = {
            "--pipeline-chunks": self.pipeline_chunks > 1,
            "--num-layers-per-virtual-pipeline-stage": bool(self.layers_per_chunk),
            "--partition-method": self.partition_method != "balanced",
        }
        if flags := [flag for flag, is_said in exclusive.items() if is_said]:
            return f"--pipeline-model-parallel-layout says the chunks, got {', '.join(flags)} too. Leave it out"
        try:
            num_pieces = len(parse_layout(self.pipeline_layout))
        except ValueError as error:
            return str(error)
        if num_pieces % self.num_stages:
            return (
                "--pipeline-model-parallel-layout must have a multiple of --pipe-parallel-size pieces, got "
                f"{num_pieces} and {self.num_stages} in {self.pipeline_layout!r}"
            )
        return None

    def _auto_problem(self) -> str | None:
        """Return the reason why "auto" cannot choose among the named schedules, or None."""
        flag, names = "--pipeline-auto-schedules", self.pipeline_auto_schedules
        if names is None:
            return None
        possible = candidates(AUTO, self.chunks, self.placement)
        if self.pipeline_schedule != AUTO:
            return f"{flag} needs --pipeline-schedule auto, got {flag} {names} and {self.schedule}. Leave one out"
        known = [name for name in SCHEDULES if name != AUTO]
        if not self.auto_schedules or not set(self.auto_schedules) <= set(known):
            return f"{flag} must be some of {', '.join(known)}, with commas between them, got {flag} {names}"
        if not set(self.auto_schedules) & set(possible):
            return (
                f"{flag} must name some of {', '.join(possible)} for chunks that lie as these, got {flag} {names}. "
                "Name others, or lay chunks out by --pipeline-chunks and --pipeline-placement"
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
        if (self.placement == V) != (schedule in IN_A_V) and (self.placement == V or not is_auto(schedule)):
            needs = V if schedule in IN_A_V else LOOP
            if not is_auto(schedule):
                yield (
                    f"the schedule {schedule} needs its chunks in a {needs}, {got}, --pipeline-placement "
                    f"{self.placement}. Leave one of the two out"
                )
            return
        if 0 < self.group_size < self.num_stages:
            yield (
                "--microbatch-group-size-per-virtual-pipeline-stage must be --pipe-parallel-size or more, got "
                f"{self.group_size} and {self.num_stages}"
            )
        if self.placement == V:
            if chunks != 2:
                yield f"a V has two chunks on each stage, {got}. Use --pipeline-chunks 2, or leave it out"
            return
        if chunks == 1 and schedule not in ONE_CHUNK and not is_auto(schedule):
            yield f"the schedule {schedule} needs several chunks on each stage, {got}. Use --pipeline-chunks 2"
        if chunks > 1 and schedule not in MANY_CHUNKS and not is_auto(schedule):
            yield (
                f"several chunks on each stage need the schedule {' or '.join(MANY_CHUNKS)}, {got}. "
                "Leave one of the two out"
            )
