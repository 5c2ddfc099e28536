"""Write ``losses*.txt``: what small models lose on the repository's own texts, in fp64, step by step.

``python -m tests.golden.make_losses`` after a change that is meant to change numbers; the diff shows which.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType

import pretrain_gpt2
import pretrain_t5
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import make_flags, train_ranks, write_corpus

FILES = {pretrain_gpt2: Path(__file__).with_name("losses.txt"), pretrain_t5: Path(__file__).with_name("losses_t5.txt")}
EXTRA = "--fp64 --hidden-dropout 0 --attention-dropout 0 --seed 42 --eval-iters 0"


def golden_losses(script: ModuleType, num_ranks: int, layout: str, folder: Path) -> list[float]:
    """Train ``script`` 20 steps in ``layout`` on ``num_ranks`` ranks; return the loss of each."""
    prefix = write_corpus(folder)
    argv = make_flags(prefix, folder / "run", f"{EXTRA} {layout}", script)
    codes, _ = train_ranks(num_ranks, argv, script=script)
    if any(codes):
        raise RuntimeError(f"training ended with exit codes {codes}")
    return [r["loss"] for r in read_metrics(folder / "run" / "metrics.jsonl") if r["kind"] == "train"]


def read_golden(script: ModuleType) -> list[float]:
    """Return the committed losses."""
    return [float(line) for line in FILES[script].read_text().splitlines() if not line.startswith("#")]


def main() -> None:
    for script, file in FILES.items():
        with tempfile.TemporaryDirectory() as folder:
            losses = golden_losses(script, 1, "", Path(folder))
        head = f"# {script.__name__}.py on the repository's own texts; {EXTRA}; sizes: tests/helpers/runs.py\n"
        file.write_text(head + "".join(f"{loss:.12f}\n" for loss in losses))


if __name__ == "__main__":
    main()
