"""Write ``losses.txt``: what a small GPT-2 loses on the repository's own texts, in fp64, step by step.

``python -m tests.golden.make_losses`` after a change that is meant to change numbers; the diff shows which.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron.training.metrics import read_metrics
from tests.training.runs import flags, train_ranks, write_corpus

FILE = Path(__file__).with_name("losses.txt")
EXTRA = "--fp64 --hidden-dropout 0 --attention-dropout 0 --seed 42 --eval-iters 0"


def golden_losses(num_ranks: int, layout: str, folder: Path) -> list[float]:
    """Train 20 steps in ``layout`` on ``num_ranks`` ranks; return the loss of each."""
    prefix = write_corpus(folder)
    codes, _ = train_ranks(num_ranks, flags(prefix, folder / "run", f"{EXTRA} {layout}"))
    if any(codes):
        raise RuntimeError(f"training ended with exit codes {codes}")
    return [record["loss"] for record in read_metrics(folder / "run" / "metrics.jsonl")]


def read_golden() -> list[float]:
    """Return the committed losses."""
    return [float(line) for line in FILE.read_text().splitlines() if not line.startswith("#")]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        losses = golden_losses(1, "", Path(folder))
    head = f"# {__doc__.splitlines()[0]}\n# flags: {EXTRA}; sizes: tests/training/runs.py\n"
    FILE.write_text(head + "".join(f"{loss:.12f}\n" for loss in losses))


if __name__ == "__main__":
    main()
