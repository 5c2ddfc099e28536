"""The runs that are killed: a tiny GPT-2 with dropout, in several layouts and ways to save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data import IndexedDatasetBuilder
from megatron.tokenizer import build

TOKENIZER = Path(__file__).resolve().parents[2] / "tests" / "golden" / "tokenizer.json"
SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --hidden-bias --batch-size 2 --gas 2 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --lr 3e-3 --warmup 0.1 --log-interval 1 --eval-iters 0 "
    f"--split 900,50,50 --device cpu --progress plain --tokenizer-path {TOKENIZER}"
).split()
LAYOUTS = {
    "t2p2": (4, "--model-parallel-size 2 --pipe-parallel-size 2"),
    "t2d2": (4, "--model-parallel-size 2 --zero-stage 1"),
    "p2d2": (4, "--pipe-parallel-size 2 --zero-stage 1"),
    "p2": (2, "--pipe-parallel-size 2"),
    "d2": (2, ""),
    "one": (1, ""),
}
"""name -> (ranks, flags)."""


@dataclass(frozen=True)
class Case:
    """One kind of run.

    Args:
        layout: a name of ``LAYOUTS``.
        interval: steps between saves.
        keep_last: checkpoints to keep; 0: all.
        is_async: saves are written while training goes on.
    """

    layout: str
    steps: int = 12
    interval: int = 1
    keep_last: int = 0
    is_async: bool = False

    @property
    def num_ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def most_lost(self) -> int:
        """Steps that a kill may cost: those since the last save, and one save more that was still being written."""
        return self.interval * (2 if self.is_async else 1)

    @property
    def name(self) -> str:
        kept = f", keep {self.keep_last}" if self.keep_last else ""
        return f"{self.layout}, {'async' if self.is_async else 'sync'} save every {self.interval}{kept}"

    def flags(self, prefix: Path, folder: Path) -> list[str]:
        """Return the command line of the run on the token files ``prefix`` in the run folder ``folder``.

        Every start has the same one, as a job that SLURM requeues.
        """
        extra = f"{LAYOUTS[self.layout][1]} --train-iters {self.steps} --save-interval {self.interval}"
        extra += f" --keep-last {self.keep_last}" if self.keep_last else ""
        extra += " --async-save" if self.is_async else ""
        going_on = ["--save", str(folder), "--resume", "--load-if-exists"]
        return [*SIZES, "--data-path", str(prefix), *extra.split(), *going_on]


def write_corpus(folder: Path, num_documents: int = 300, seed: int = 0) -> Path:
    """Write documents of random tokens into ``folder`` and return the prefix of the files."""
    tokenizer, draw = build(tokenizer_path=TOKENIZER), np.random.default_rng(seed)
    prefix = folder / "tokens"
    with IndexedDatasetBuilder(
        prefix, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.identity, eod_id=tokenizer.eod_id
    ) as writer:
        for _ in range(num_documents):
            tokens = draw.integers(0, tokenizer.vocab_size, size=draw.integers(20, 200))
            writer.add(np.array([*tokens, tokenizer.eod_id]))
    return prefix
