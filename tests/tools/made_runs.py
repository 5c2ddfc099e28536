"""Run folders as a training leaves them, made up: for the report's tests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def make_record(step: int, run: int = 0, **overrides: Any) -> dict[str, Any]:
    """Return a record of a pipeline of two stages."""
    loss = 6.0 * math.exp(-step / 40) + 2.0 + 0.1 * run
    values = {
        "loss": loss, "perplexity": math.exp(loss), "learning_rate": 1e-3 / step, "grad_norm": 1.0 + 3.0 / step,
        "layer_norms": {"embedding.word": 0.5, "layers.0": 0.8}, "loss_scale": 1.0, "samples": 8 * step,
        "tokens": 1024 * step, "corpus_tokens": {"a": 512 * step, "b": 512 * step}, "skipped": 0, "step_s": 0.5,
        "tokens_per_s": 2048.0 + run, "flops_per_s": 1e9, "mfu": 0.4, "data_wait": 0.01, "bubble": 0.25,
        "bubble_predicted": 0.2, "checkpoint_stall_s": 0.0, "work_s": {"stage 0": 0.4, "stage 1": 0.3},
        "memory_bytes": {"stage 0": 2.0**30, "stage 1": 1.5 * 2**30}, "time": 1.7e9 + step,
    }  # fmt: skip
    return {"kind": "train", "step": step, **values, **overrides}


def make_run(folder: Path, steps: int = 60, run: int = 0, **config: Any) -> Path:
    """Write the folder of a run that has ended; ``config`` are settings of its model."""
    folder.mkdir(parents=True)
    records = [make_record(step, run) for step in range(1, steps + 1)]
    evaluations = (
        {"kind": "valid", "step": steps // 2, "loss": 4.5, "perplexity": 90.02},
        {"kind": "test", "step": steps, "loss": 3.25},
    )
    saved = {"kind": "save", "step": steps // 2, "save_stall_s": 0.5}
    lines = [*records, *evaluations, saved]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "family": "gpt2",
        "model": {"num_layers": 4, "hidden_size": 32, **config},
        "batch": {"train_iters": steps, "seq_length": 128},
        "parallel": {"pipe_parallel_size": 2, "model_parallel_size": 1, "pipeline_trace": None},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "versions.json").write_text(json.dumps({"torch": "2.13.0", "world_size": 2}))
    (folder / "command.txt").write_text("2026-11-22 15:00:00  python pretrain_gpt2.py --lr 1e-3\n")
    starts = [{"step": 0, "time": 1.7e9, "ranks": 2}, {"step": 20, "time": 1.7e9 + 20, "ranks": 2}]
    (folder / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    stages = [
        {"stage": 0, "ranks": 1, "layers": "layers 0-2 of 7", "parameters": 12_000, "estimated_bytes": 2**30},
        {"stage": 1, "ranks": 1, "layers": "layers 3-6 of 7", "parameters": 13_000, "estimated_bytes": 2**30},
    ]
    memory_parts = {"weights": 2**29, "gradients": 2**28, "optimizer": 2**28, "gathered": 0, "host": 2**20}
    (folder / "stages.json").write_text(json.dumps([{**stage, "estimated_parts": memory_parts} for stage in stages]))
    return folder
