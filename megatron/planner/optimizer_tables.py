"""Generate the tables of docs/optimizers.md: ``python -m megatron.planner.optimizer_tables``.

All values are computed from the formulas of ``megatron.costs`` and the planner, for H100 GPUs with 80 GB.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from megatron.arguments import config_from_values
from megatron.config import Config
from megatron.costs.memory import State
from megatron.costs.replica_messages import Messages, chunk_weights, messages_per_step
from megatron.planner.estimate import Planner
from megatron.planner.layout import Layout
from megatron.planner.machine import gpu_machine
from tds.gradients import BUCKET_NUMEL_PER_REPLICA, MIN_BUCKET_NUMEL
from tds.partition import chunks_on

GPU = "h100-80g"
SAMPLES, SEQ_LENGTH = 512, 4096
GIGABYTE = 1e9
OPTIMIZERS = (
    ("AdamW", "adamw", 0, 0),
    ("AdamW, `--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16`", "adamw", 2, 0),
    ("AdamW, `--exp-avg-dtype 8bit --exp-avg-sq-dtype 8bit`", "adamw", 0, 2),
    ("Muon, NorMuon", "muon", 0, 0),
    ("AdaMuon", "adamuon", 0, 0),
    ("SGD with momentum", "momentum", 0, 0),
    ("Adafactor", "adafactor", 0, 0),
)
"""(name, ``OptimizerConfig.state_type``, number of states in bf16, number of states in 8 bits)."""


@dataclass(frozen=True)
class Model:
    """A model of the tables: layers, hidden size, heads, key groups, feed-forward size, vocabulary."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_groups: int
    ff_hidden_size: int
    vocab_size: int

    def config(self) -> Config:
        """Return the configuration of a LLaMA of these sizes."""
        return config_from_values(
            {
                "num_layers": self.num_layers,
                "hidden_size": self.hidden_size,
                "num_attention_heads": self.num_heads,
                "num_query_groups": self.num_groups,
                "ff_hidden_size": self.ff_hidden_size,
                "seq_length": SEQ_LENGTH,
                "max_position_embeddings": SEQ_LENGTH,
                "vocab_size": self.vocab_size,
            },
            family="llama",
        )


SMALL = Model("1B", 16, 2048, 32, 8, 8192, 128256)
MEDIUM = Model("7B", 32, 4096, 32, 32, 11008, 32000)
LARGE = Model("30B", 60, 6656, 52, 52, 17920, 32000)
LAYOUTS = (
    (SMALL, Layout(data=8)),
    (SMALL, Layout(data=64)),
    (MEDIUM, Layout(data=8)),
    (MEDIUM, Layout(data=64)),
    (MEDIUM, Layout(tensor=2, pipe=2, data=16, sequence_parallel=True)),
    (LARGE, Layout(tensor=4, data=2, sequence_parallel=True)),
    (LARGE, Layout(tensor=4, data=16, sequence_parallel=True)),
    (LARGE, Layout(tensor=4, pipe=4, data=4, sequence_parallel=True)),
)
"""Models of 1.5B, 6.7B and 32.5B parameters, and the layouts of the second table."""


def planned_layout(layout: Layout, stage: int) -> Layout:
    """Return ``layout`` with the batch and the recompute of the tables, and with ZeRO stage ``stage``."""
    return replace(
        layout,
        dtype="bf16",
        micro_batch_size=1,
        num_micro_batches=SAMPLES // layout.data,
        recompute="full",
        zero_stage=stage,
    )


def replica_messages(planner: Planner, layout: Layout) -> Messages:
    """Return the messages between the replicas of the stage that sends the most bytes."""
    costs = planner.model(layout).costs
    bounds = costs.stage_bounds(layout.pipe, layout.chunks, layout.placement.style)
    state = State.for_optimizer(layout.dtype, layout.optimizer)
    max_bucket = max(MIN_BUCKET_NUMEL, BUCKET_NUMEL_PER_REPLICA * layout.data)
    stages = []
    for stage in range(layout.pipe):
        ranges = chunks_on(bounds, layout.pipe, stage, layout.placement.style)
        messages = messages_per_step(
            [
                chunk_weights(costs, start, stop, layout.tensor, has_pipeline=layout.pipe > 1, stage_ranges=ranges)
                for start, stop in ranges
            ],
            stage=layout.zero_stage,
            replicas=layout.data,
            num_micro_batches=layout.num_micro_batches,
            width=state.width,
            gradient=state.gradient,
            max_reduced=max_bucket if layout.zero_stage < 2 else None,
            max_gathered=max_bucket,
        )
        stages.append(messages)
    return max(stages, key=lambda messages: messages.num_bytes)


def optimizer_rows() -> Iterator[Sequence[str]]:
    """Yield the header and the rows of the table of optimizer states."""
    models = (SMALL, MEDIUM, LARGE)
    yield (
        "optimizer",
        "bytes per parameter, ZeRO 0",
        *(f"{model.name}: GB with ZeRO 0, 1 on 8 GPUs" for model in models),
    )
    for name, optimizer, num_bf16_states, num_8bit_states in OPTIMIZERS:
        state = State.for_optimizer("bf16", optimizer, num_bf16_states, num_8bit_states)
        states = state.optimizer - state.saved
        layer_note = f" ({_decimal(state.optimizer)} outside of layers)" if state.saved else ""
        cells = []
        for model in models:
            values = []
            for stage in (0, 1):
                layout = replace(planned_layout(Layout(data=8), stage), optimizer=optimizer)
                layout = replace(layout, num_bf16_states=num_bf16_states, num_8bit_states=num_8bit_states)
                memory = Planner(model.config(), gpu_machine(GPU)).memory(layout)[0]
                values.append(memory.weights + memory.gradients + memory.optimizer)
            has_zero = optimizer != "adafactor"
            cells.append(", ".join(f"{value / GIGABYTE:.1f}" for value in (values if has_zero else values[:1])))
        yield name, f"{state.width} + {state.gradient} + {_decimal(states)}{layer_note}", *cells


def _decimal(value: int | Fraction) -> str:
    return f"{float(value):.3g}"


def stage_rows() -> Iterator[Sequence[str]]:
    """Yield the header and the rows of the table of ZeRO stages."""
    yield (
        "model", "GPUs", "tp x pp x dp", "ZeRO", "weights, gradients, optimizer: GB", "memory: GB", "sent: GB",
        "messages", "planned step",
    )  # fmt: skip
    machine = gpu_machine(GPU)
    for model, base_layout in LAYOUTS:
        planner = Planner(model.config(), machine)
        for stage in range(4):
            layout = planned_layout(base_layout, stage)
            estimate, messages = planner.estimate(layout), replica_messages(planner, layout)
            memory = max(estimate.memory, key=lambda stage_memory: stage_memory.total)
            states = memory.weights + memory.gradients + memory.optimizer
            fits = memory.total <= machine.usable_bytes
            yield (
                model.name, str(layout.world_size), f"{layout.tensor} x {layout.pipe} x {layout.data}", str(stage),
                f"{states / GIGABYTE:.1f}", f"{memory.total / GIGABYTE:.1f}" + ("" if fits else " (too much)"),
                f"{messages.num_bytes / GIGABYTE:,.1f}", f"{messages.count:,}",
                f"{estimate.step_s:.1f} s" if fits else "",
            )  # fmt: skip


def table(rows: Iterator[Sequence[str]]) -> str:
    """Format rows, of which the first is the header, as a Markdown table."""
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    sys.stdout.write(f"{table(optimizer_rows())}\n\n{table(stage_rows())}\n")
