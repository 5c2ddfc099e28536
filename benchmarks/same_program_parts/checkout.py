"""A checkout whose programs are run, and what each comparison is given."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.same_program_parts.cases import PROGRAMS, SIZES

DEADLINE_S = 900


@dataclass(frozen=True)
class Checkout:
    """A working tree whose programs are run."""

    root: Path

    def run(self, command: str | list[str], env: Mapping[str, str] | None = None, code: int | None = 0) -> str:
        """Run Python with ``command`` in the checkout; return what it wrote, both streams, without its own path.

        Raises:
            RuntimeError: the exit code is not ``code`` (None: any; it is then the last line).
        """
        words = command.split() if isinstance(command, str) else command
        own = {key: value for key, value in os.environ.items() if not key.startswith("MEGATRON_")}
        own |= {"PYTHONPATH": str(self.root), "PYTHON": sys.executable, "DS_ACCELERATOR": "cpu", "COLUMNS": "100"}
        own |= {"OMP_NUM_THREADS": own.get("OMP_NUM_THREADS", "1"), "TOKENIZERS_PARALLELISM": "false", **(env or {})}
        program = words if words[0] == "bash" else [sys.executable, *words]
        done = subprocess.run(program, cwd=self.root, env=own, capture_output=True, text=True, timeout=DEADLINE_S)
        if code is not None and done.returncode != code:
            last = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            raise RuntimeError(f"{' '.join(words)} ended with code {done.returncode} in {self.root}:\n{last}")
        told = f"{done.stdout}{done.stderr}".replace(str(self.root), "<checkout>")
        return told if code is not None else f"{told}\nexit code {done.returncode}\n"

    def train(self, family: str, folder: Path, data: str, flags: str, ranks: int = 4) -> Path:
        """Train in the run folder ``folder``, which is returned."""
        length = "--enc-seq-length 32" if family == "t5" else "--seq-length 32"
        launch = f"-m megatron.launch --nproc-per-node {ranks} --preload torch,deepspeed"
        self.run(f"{launch} {PROGRAMS[family]} {SIZES} {length} {data} {flags} --save {folder}")
        return folder


@dataclass(frozen=True)
class Job:
    """What every part is given."""

    here: Checkout
    other: Checkout
    folder: Path
    args: argparse.Namespace
    reasons: Mapping[str, str]

    def both(self) -> Iterator[tuple[str, Checkout]]:
        yield "other", self.other
        yield "here", self.here

    def data(self) -> str:
        """Return the flags of token files of the repository's texts, which the other checkout writes once."""
        prefix, tokenizer = self.folder / "texts", self.folder / "tokenizer.json"
        if not prefix.with_suffix(".idx").exists():
            shutil.copy(self.other.root / "tests/golden/tokenizer.json", tokenizer)
            tokenize(self.other, sorted((self.other.root / "examples/corpus").glob("*/*.txt")), tokenizer, prefix)
        return f"--data-path {prefix} --tokenizer-path {tokenizer}"


Found = tuple[list[str], str]
"""The differences, and what is told of a comparison besides."""
Check = tuple[str, Callable[[], Found]]


def tokenize(where: Checkout, texts: Sequence[Path], tokenizer: Path, prefix: Path, code: int = 0) -> None:
    """Write the token files ``prefix`` of ``texts``."""
    inputs = ["--input", *map(str, texts), "--tokenizer-path", str(tokenizer), "--output-prefix", str(prefix)]
    where.run(["tools/preprocess_data.py", *inputs, "--workers", "1"], code=code)
