"""A real run that saves in the background, and what its metrics say of the time in which training stood still."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megatron.training.callbacks.metrics_writer import read_metrics

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"NHIDDEN": "256", "GPUS_PER_NODE": "1", "pp_size": "1", "mp_size": "1"}
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Stalls:
    """What a run told of its saves: seconds that training stood still, and their share of the time between saves."""

    seconds: list[float]
    shares: list[float]
    staged_bytes: int


def run_small(folder: Path, steps: int, interval: int) -> Stalls:
    """Train GPT-2 by ``run_gpt2.sh`` for ``steps`` steps, saving every ``interval``.

    Raises:
        RuntimeError: the run failed, or told of no save.
    """
    environment = {**os.environ, **SETTINGS, "TRAIN_ITERS": str(steps), "CHECKPOINT_PATH": str(folder)}
    words = f"--async-save --save-interval {interval} --keep-last 1 --eval-iters 0 --progress plain".split()
    done = subprocess.run(
        ["bash", str(ROOT / "run_gpt2.sh"), *words],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the small run ended with code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    staged = [record for record in read_metrics(folder / "metrics.jsonl") if "save_stall_s" in record]
    if not staged:
        raise RuntimeError(f"the small run told of no save in {steps} steps, saving every {interval}")
    return Stalls(
        seconds=[record["save_stall_s"] for record in staged],
        shares=[record["save_stall_share"] for record in staged],
        staged_bytes=staged[-1]["staged_bytes"],
    )
