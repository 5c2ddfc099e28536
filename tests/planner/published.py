"""Published runs, and what the planner says of them: ``python -m tests.planner.published`` prints both tables.

Nothing is tuned for a row: all A100s are one set of numbers, and what a paper does not say is assumed alike for all of
its rows. Rates are turned into seconds of a step by the paper's own count of FLOPs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megatron.arguments import config_from_values
from megatron.config import Config
from megatron.costs.decoder_cost import DecoderCosts
from megatron.models import registry
from megatron.planner.estimate import Estimate, Planner
from megatron.planner.layout import Layout
from megatron.planner.machine import gpu_machine

SC21 = "Narayanan et al. 2021 (SC21), table 1"
SELECTIVE = "Korthikanti et al. 2022, table 5"
MT_NLG = "Smith et al. 2022 (MT-NLG 530B)"
BLOOM = "BigScience 2022 (BLOOM 176B)"
NEOX = "Black et al. 2022 (GPT-NeoX-20B)"
LLAMA = "Touvron et al. 2023 (LLaMA 65B)"
LLAMA3 = "Grattafiori et al. 2024 (Llama 3 405B), table 4"


RATIO_TOLERANCE = 0.12
"""Of the step's seconds, for runs of ``SAME_PROGRAM_SOURCES``."""
SAME_PROGRAM_SOURCES = (SC21, SELECTIVE, LLAMA3)


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A run of a paper: its model and layout, and how long a step took.

    Args:
        figure: what the paper says, in its words.
        step_s: the same as seconds of a step.
    """

    name: str
    source: str
    figure: str
    step_s: float
    model_shape: tuple[int, int, int, int, int]  # L, h, a, s, v
    layout: Layout
    gpu: str = "a100-80g"
    family: str = "gpt2"
    overrides: tuple[tuple[str, Any], ...] = ()
    is_fused: bool = False

    @property
    def config(self) -> Config:
        layers, hidden, heads, length, vocabulary = self.model_shape
        values = {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "seq_length": length,
            "max_position_embeddings": length,
            "vocab_size": vocabulary,
            "hidden_bias": self.family == "gpt2",
        }
        return config_from_values({**values, **dict(self.overrides)}, family=self.family)

    @cache  # noqa: B019 - a handful of frozen rows
    def estimate(self) -> Estimate:
        """Return what the planner says."""
        costs = registry.costs_of(self.config)
        assert isinstance(costs, DecoderCosts)
        return Planner(self.config, gpu_machine(self.gpu), replace(costs, is_fused=self.is_fused)).estimate(self.layout)

    @property
    def ratio(self) -> float:
        """Predicted over published seconds."""
        return self.estimate().step_s / self.step_s

    @property
    def mfu_points(self) -> float:
        """Predicted less published MFU, in points of a hundred."""
        estimate = self.estimate()
        return 100 * estimate.mfu * (1 - estimate.step_s / self.step_s)


def megatron_flops(model_shape: tuple[int, int, int, int, int], batch: int) -> float:
    """Return the FLOPs of a step as SC21 counts them, equation 3: all attention, and the forward of full recompute."""
    layers, h, _, s, v = model_shape
    return 96.0 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))


def sc21(
    name: str, a: int, h: int, layers: int, t: int, p: int, gpus: int, batch: int, tflops: int, micro: int
) -> PublishedRun:
    """A row of the weak scaling; chunks and micro-batches are not in the table."""
    model_shape = (layers, h, a, 2048, 51200)
    d = gpus // t // p
    return PublishedRun(
        name=name,
        source=SC21,
        figure=f"{tflops} TFLOP/s a GPU",
        step_s=megatron_flops(model_shape, batch) / gpus / tflops / 1e12,
        model_shape=model_shape,
        layout=early_layout(tensor=t, pipe=p, data=d, micro_batch_size=micro, num_micro_batches=batch // d // micro),
    )


def selective(
    name: str,
    model_shape: tuple[int, int, int],
    p: int,
    batch: int,
    micro: int,
    chunks: int,
    step_s: float,
    *,
    full: bool,
) -> PublishedRun:
    """A row with full recomputation, or with selective recomputation and sequence parallelism."""
    schedule = "interleaved" if chunks > 1 else "1f1b"
    base_layout = early_layout(tensor=8, pipe=p, micro_batch_size=micro, num_micro_batches=batch // micro)
    base_layout = replace(base_layout, chunks=chunks, schedule=schedule)
    layout = base_layout if full else replace(base_layout, recompute="selective", sequence_parallel=True)
    label = "full recompute" if full else "selective, sequence parallel"
    return PublishedRun(
        name=f"{name}, {label}",
        source=SELECTIVE,
        figure=f"{step_s} s",
        step_s=step_s,
        model_shape=(model_shape[0], model_shape[1], model_shape[2], 2048, 51200),
        layout=layout,
    )


def early_layout(**kwargs: Any) -> Layout:
    """A layout of Megatron's before 2023: 16 bits, all recomputed, sums behind nothing."""
    return Layout(recompute="full", dtype="fp16", overlap_grad_reduce=False, overlaps_tensor=False, **kwargs)


_MT = (105, 20480, 128, 2048, 50257)
_BLOOM = (70, 14336, 112, 2048, 250880)
_NEOX = (44, 6144, 64, 2048, 50432)
_65B = (80, 8192, 64, 2048, 32000)
_405B = (126, 16384, 128, 8192, 128256)
_LLAMA3_FLOPS = 6.0 * 405e9 * 2048 * 8192

RUNS = (
    sc21("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137, 8),
    sc21("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138, 8),
    sc21("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142, 8),
    sc21("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135, 8),
    sc21("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138, 2),
    sc21("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140, 2),
    sc21("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148, 1),
    sc21("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155, 1),
    sc21("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163, 1),
    sc21("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 163, 1),
    selective("22B", (48, 6144, 64), 1, 4, 4, 1, 1.42, full=True),
    selective("22B", (48, 6144, 64), 1, 4, 4, 1, 1.10, full=False),
    selective("175B", (96, 12288, 96), 8, 64, 1, 3, 18.13, full=True),
    selective("175B", (96, 12288, 96), 8, 64, 1, 3, 13.75, full=False),
    selective("530B", (105, 20480, 128), 35, 280, 1, 3, 49.05, full=True),
    selective("530B", (105, 20480, 128), 35, 280, 1, 3, 37.83, full=False),
    selective("1T", (128, 25600, 160), 64, 512, 1, 1, 94.42, full=True),
    selective("1T", (128, 25600, 160), 64, 512, 1, 1, 71.49, full=False),
    *(
        PublishedRun(
            name=f"530B on {gpus} GPUs",
            source=MT_NLG,
            figure=f"{step_s} s",
            step_s=step_s,
            model_shape=_MT,
            layout=early_layout(tensor=8, pipe=35, data=gpus // 280, num_micro_batches=1920 * 280 // gpus),
        )
        for gpus, step_s in ((2240, 60.1), (2800, 50.2), (3360, 44.4))
    ),
    PublishedRun(
        name="176B on 384 GPUs",
        source=BLOOM,
        figure="150 TFLOP/s a GPU",
        step_s=megatron_flops(_BLOOM, 2048) / 384 / 150e12,
        model_shape=_BLOOM,
        layout=replace(
            early_layout(tensor=4, pipe=12, data=8, micro_batch_size=2, num_micro_batches=128),
            zero_stage=1,
            dtype="bf16",
        ),
    ),
    PublishedRun(
        name="20B on 96 GPUs",
        source=NEOX,
        figure="117 TFLOP/s a GPU",
        step_s=megatron_flops(_NEOX, 1536) / 96 / 117e12,
        model_shape=_NEOX,
        layout=replace(early_layout(tensor=2, pipe=4, data=12, micro_batch_size=4, num_micro_batches=32), zero_stage=1),
        gpu="a100-40g",
    ),
    PublishedRun(
        name="65B on 2048 GPUs",
        source=LLAMA,
        figure="380 tokens/s a GPU",
        step_s=2048 * 2048 / 380 / 2048,
        model_shape=_65B,
        layout=Layout(  # not told: what the planner finds best
            tensor=4,
            pipe=8,
            data=64,
            micro_batch_size=2,
            num_micro_batches=16,
            chunks=5,
            schedule="interleaved",
            sequence_parallel=True,
        ),
        family="llama",
        overrides=(("ff_hidden_size", 22016), ("num_query_groups", 64)),
        is_fused=True,
    ),  # fmt: skip
    *(
        PublishedRun(
            name=f"405B on {gpus} GPUs",
            source=LLAMA3,
            figure=f"{tflops} TFLOP/s a GPU",
            step_s=_LLAMA3_FLOPS / gpus / tflops / 1e12,
            model_shape=_405B,
            layout=Layout(
                tensor=8,
                pipe=16,
                data=gpus // 128,
                num_micro_batches=2048 * 128 // gpus,
                chunks=7,
                schedule="interleaved",
                zero_stage=1,
                sequence_parallel=True,
            ),
            gpu="h100-80g",
            family="llama",
            overrides=(("ff_hidden_size", 53248), ("num_query_groups", 8)),
            is_fused=True,
        )  # fmt: skip
        for gpus, tflops in ((8192, 430), (16384, 400))
    ),
)


def summary_table() -> str:
    """Return the table of docs/planner.md: of the runs of each paper the least and the most."""
    rows = ["| source | runs | predicted / published | MFU, points |", "|---|---|---|---|"]
    for source in dict.fromkeys(run.source for run in RUNS):
        runs = [run for run in RUNS if run.source == source]
        ratios, points = [run.ratio for run in runs], [run.mfu_points for run in runs]
        ratio_text = " to ".join(dict.fromkeys((f"{min(ratios):.2f}", f"{max(ratios):.2f}")))
        points_text = " to ".join(dict.fromkeys((f"{min(points):+.1f}", f"{max(points):+.1f}")))
        rows.append(f"| {source} | {len(runs)} | {ratio_text} | {points_text} |")
    return "\n".join(rows) + "\n"


def runs_table() -> str:
    """Return a line for each run."""
    rows = ["| source | run | published | step of it, s | predicted, s | predicted / published | MFU, points |"]
    rows.append("|---|---|---|---|---|---|---|")
    for run in RUNS:
        estimate = run.estimate()
        rows.append(
            f"| {run.source} | {run.name} | {run.figure} | {run.step_s:.2f} | {estimate.step_s:.2f} | {run.ratio:.2f} "
            f"| {run.mfu_points:+.1f} |"
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(f"{runs_table()}\n{summary_table()}")
