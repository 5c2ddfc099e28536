"""What of a layout is too large, and the smallest change that makes it fit.

A change is one thing: less kept for backward, a smaller micro-batch, the next stage of ZeRO, an axis twice as long
(with half the replicas), sequence parallelism, the optimizer on the host. The samples of a step stay the same. Of those
that fit and that the training's checks take, the one whose step is shortest is the smallest; if none does, two are made
at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron import cost
from megatron.planner.checks import problems
from megatron.planner.estimate import Estimate, Planner
from megatron.planner.layout import Layout
from megatron.planner.search import divisors
from megatron.stages import ONE_CHUNK

PARTS = ("weights", "gathered", "gradients", "optimizer", "activations", "logits", "buffers")
"""Fields of ``Memory`` that lie on the device in a step."""
HALF = 2
WHOLE = 3
"""The stage of ZeRO that cuts the weights, too."""


@dataclass(frozen=True)
class Remedy:
    """One change, or several, and what the layout takes then."""

    changes: tuple[str, ...]
    found: Estimate


@dataclass(frozen=True)
class Overflow:
    """The fullest stage of a layout that does not fit.

    Args:
        part: the largest of what it holds, of ``PARTS``.
        over: bytes that are too many.
    """

    stage: int
    part: str
    part_bytes: int
    needed: int
    over: int


def overflow(found: Estimate, usable: int) -> Overflow | None:
    """Return what does not fit into so many bytes, or None."""
    stage = max(range(len(found.memory)), key=lambda n: found.memory[n].total)
    memory = found.memory[stage]
    if memory.total <= usable:
        return None
    part = max(PARTS, key=lambda name: int(getattr(memory, name)))
    return Overflow(stage, part, int(getattr(memory, part)), memory.total, memory.total - usable)


def remedies(planner: Planner, layout: Layout) -> list[Remedy]:
    """Return the changes that make ``layout`` fit, the one with the shortest step first; single ones if any do."""
    single = list(changes(planner, layout))
    found = list(_fitting(planner, [((told,), changed) for told, changed in single]))
    if not found:
        pairs: list[tuple[tuple[str, ...], Layout]] = [
            ((first, second), changed)
            for first, once in single
            for second, changed in changes(planner, once)
            if changed != layout
        ]
        found = list(_fitting(planner, pairs))
    return sorted(found, key=lambda one: one.found.step_s)


def changes(planner: Planner, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield each single change, in the words of the command line, and the layout that it makes."""
    if layout.recompute != "full":
        yield "--checkpoint-activations", replace(layout, recompute="full")
    if layout.recompute == "none" and any(unit.core for unit in planner.costs.unit_kept(1, 1, 2)):
        yield "--recompute-granularity selective", replace(layout, recompute="selective")
    for micro in divisors(layout.micro_batch_size)[:-1]:
        number = layout.num_micro_batches * layout.micro_batch_size // micro
        yield (
            f"--batch-size {micro} --gas {number}",
            replace(layout, micro_batch_size=micro, num_micro_batches=number),
        )
    last = 1 if layout.pipe > 1 else 3
    if layout.data > 1 and layout.optimizer != "adafactor":
        for stage in range(layout.zero_stage + 1, last + 1):
            yield f"--zero-stage {stage}", replace(layout, zero_stage=stage)
    yield from _longer(planner, layout)
    lengths = planner.config.sequence_lengths
    if layout.tensor > 1 and not layout.sequence_parallel and all(n % layout.tensor == 0 for n in lengths):
        yield "--sequence-parallel", replace(layout, sequence_parallel=True)
    if not layout.offload_optimizer:
        yield "--offload-optimizer", replace(layout, offload_optimizer=True)
    if layout.zero_stage == 3 and not layout.offload_parameters:
        yield "--offload-parameters", replace(layout, offload_parameters=True)


def _longer(planner: Planner, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield the layouts with an axis twice as long and half the replicas, which do twice the micro-batches."""
    if layout.data % HALF:
        return
    fewer = replace(layout, data=layout.data // HALF, num_micro_batches=layout.num_micro_batches * HALF)
    if fewer.data == 1:
        fewer = _with_stage(fewer, 0)
    model, own = planner.config.model, planner.config.own
    cut = [model.num_attention_heads, model.hidden_size, model.ff_hidden_size, planner.machine.devices_per_node]
    tensor = layout.tensor * HALF
    is_whole = all(size % tensor == 0 for size in [*cut, getattr(own, "num_query_groups", tensor)])
    if is_whole and layout.optimizer != "adafactor":
        told = f"--model-parallel-size {tensor} --gas {fewer.num_micro_batches}"
        yield told + _less(layout, fewer), replace(fewer, tensor=tensor)
    pipe = layout.pipe * HALF
    if pipe * layout.chunks <= planner.config.total_layers:
        schedule = ONE_CHUNK[0] if layout.pipe == 1 and layout.chunks == 1 else layout.schedule
        piped = _with_stage(fewer, min(fewer.zero_stage, 1))
        told = f"--pipe-parallel-size {pipe} --gas {fewer.num_micro_batches}"
        yield told + _less(layout, piped), replace(piped, pipe=pipe, schedule=schedule)


def _with_stage(layout: Layout, stage: int) -> Layout:
    """Return ``layout`` with that stage of ZeRO; below 3 no weights are on the host."""
    return replace(layout, zero_stage=stage, offload_parameters=layout.offload_parameters and stage == WHOLE)


def _less(layout: Layout, changed: Layout) -> str:
    """Return the words for what ``changed`` has less of ZeRO than ``layout``."""
    told = f" --zero-stage {changed.zero_stage}" if changed.zero_stage != layout.zero_stage else ""
    return told + " without --offload-parameters" * (layout.offload_parameters and not changed.offload_parameters)


def _fitting(planner: Planner, tried: list[tuple[tuple[str, ...], Layout]]) -> Iterator[Remedy]:
    known = set()
    for told, layout in tried:
        is_new = layout not in known
        known.add(layout)
        fits = (
            is_new
            and planner.can_cut(layout)
            and overflow_of(planner.memory(layout), planner.machine.usable_bytes) <= 0
        )
        if fits and not problems(planner.config, layout):
            yield Remedy(told, planner.estimate(layout))


def overflow_of(memory: list[cost.Memory], usable: int) -> int:
    """Return by how many bytes the fullest stage exceeds ``usable``; negative where it fits."""
    return max(stage.total for stage in memory) - usable
