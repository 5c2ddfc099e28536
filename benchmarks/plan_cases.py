"""The layouts whose estimates are compared with measurement: small models that two CPU cores train in seconds."""

from __future__ import annotations

from dataclasses import dataclass

COMMON = "--batch-size 4 --gas 4 --attention-dropout 0 --hidden-dropout 0 --data-path none --device cpu --lr 1e-4"
SIZES = {
    "gpt2": "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --vocab-size 8192 --seq-length 256 "
    "--max-position-embeddings 256 --hidden-bias --activation gelu-tanh",
    "t5": "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --vocab-size 8192 --enc-seq-length 256",
    "llama": "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --vocab-size 8192 --seq-length 256",
    "mpt": "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --vocab-size 8192 --seq-length 256",
    "bert": "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --vocab-size 8192 --seq-length 256",
}
"""Family -> the sizes that are timed. Of these a step of four micro-batches takes about a second."""
SMOKE = {
    family: "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 "
    + ("--enc-seq-length 64" if family == "t5" else "--seq-length 64")
    + (" --max-position-embeddings 64 --hidden-bias" if family == "gpt2" else "")
    for family in SIZES
}
"""The same for tests, and for whether the benchmark runs at all."""


@dataclass(frozen=True)
class Case:
    """One training: a family, how many ranks, and the flags of its layout."""

    family: str
    ranks: int = 1
    flags: str = ""

    @property
    def name(self) -> str:
        words = [word.removeprefix("--") for word in self.flags.split()]
        return " ".join([self.family, f"{self.ranks} rank{'s' if self.ranks > 1 else ''}", *words])

    def argv(self, *, is_smoke: bool = False) -> list[str]:
        """Return the command line of its program."""
        sizes = (SMOKE if is_smoke else SIZES)[self.family]
        common = COMMON.replace("--hidden-dropout 0 ", "") if self.family == "llama" else COMMON
        return f"{sizes} {common} {self.flags}".split()


TENSOR, PIPE = "--model-parallel-size 2", "--pipe-parallel-size 2"
RECOMPUTE = "--checkpoint-activations"
CASES = (
    Case("gpt2"),
    Case("gpt2", 1, RECOMPUTE),
    Case("gpt2", 1, "--bf16"),
    Case("gpt2", 2, TENSOR),
    Case("gpt2", 2, f"{TENSOR} --sequence-parallel"),
    Case("gpt2", 2, PIPE),
    Case("gpt2", 2, f"{PIPE} {RECOMPUTE}"),
    Case("gpt2", 2, f"{PIPE} --pipeline-schedule zb-h1"),
    Case("gpt2", 2, f"{PIPE} --pipeline-chunks 2"),
    Case("gpt2", 2),
    Case("gpt2", 2, "--zero-stage 1"),
    Case("gpt2", 4, f"{TENSOR} {PIPE}"),
    Case("gpt2", 4, PIPE),
    Case("t5"),
    Case("t5", 1, RECOMPUTE),
    Case("t5", 2, TENSOR),
    Case("t5", 2, PIPE),
    Case("t5", 2),
    Case("t5", 4, f"{TENSOR} {PIPE}"),
    Case("llama"),
    Case("mpt"),
    Case("bert"),
)
