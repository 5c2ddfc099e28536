"""Configurations that cannot be, by the rows C of docs/reliability.md, and what must be said; runs as a program, too.

It imports neither torch nor pytest, so that ``python -O`` can go through the whole table in a fraction of a second.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from megatron.config import parse
from megatron.errors import ConfigError, exit_code

MODEL_FLAGS = "--num-layers 4 --hidden-size 64 --num-attention-heads 4"
GPT2, T5 = f"{MODEL_FLAGS} --seq-length 32", f"{MODEL_FLAGS} --enc-seq-length 32"


class Case(NamedTuple):
    """A command line that ends with code 2, and parts of what is said; ``json`` is the content of a JSON file."""

    row: str
    line: str
    fragments: tuple[str, ...]
    world_size: int = 1
    json: str | dict[str, object] | None = None
    family: str = "gpt2"


CASES = (
    Case("C01", "--model-parallel-size 2 --batch-size 4 --gas 16",
         ("train_batch_size 64 != micro 4 x gas 16 x dp 2 = 128; dp = world 4 / (tp 2 x pp 1)",
          "Set train_batch_size to 128"), 4, {"train_batch_size": 64}),
    Case("C02", "--num-attention-heads 6 --hidden-size 96 --model-parallel-size 4",
         ("--num-attention-heads must be a multiple of --model-parallel-size, got 6 and 4", "one of [1, 2, 3, 6]"), 4),
    Case("C03", "--num-attention-heads 12 --hidden-size 66 --kv-hidden-size 4 --model-parallel-size 4",
         ("--hidden-size must be a multiple of --model-parallel-size, got 66 and 4", "may be one of [1, 2, 3, 6]"), 4),
    Case("C03", "--ff-hidden-size 34 --model-parallel-size 4", ("--ff-hidden-size must", "34 and 4", "[1, 2]"), 4),
    Case("C05", "--model-parallel-size 2 --pipe-parallel-size 2",
         ("got world_size=6", "(2 x 2 = 4). Start 4 or 8 processes"), 6),
    Case("C06", "--num-layers 2 --pipe-parallel-size 4", ("--num-layers 2 on", "0 to 2, or --num-layers 4"), 4),
    Case("C06", "--pipe-parallel-size 16", ("4 encoder and 4 decoder layers", "0 to 8"), 16, None, "t5"),
    Case("C07", "--model-parallel-size 4", ("must not exceed the world size", "world_size=2"), 2),
    Case("C08", "--hidden-size 66", ("multiple of --num-attention-heads, got 66 and 4", "one of [1, 2, 3, 6, 11] he")),
    Case("C09", "--max-position-embeddings 16", ("--seq-length must not exceed", "32 and 16", "Raise")),
    Case("C09", "--position-embedding-type learned --max-position-embeddings 16",
         ("--enc-seq-length must not exceed --max-position-embeddings, got 32 and 16",), 1, None, "t5"),
    Case("C10", "--deepspeed_config /nowhere.json", ("must name a file that can be read, got /nowhere.json",)),
    Case("C10", "", ("config.json:1:1: must contain one JSON object", "empty file"), json=""),
    Case("C10", "", ("config.json:2:3: must be JSON",), json="{\n  'a': 1}"),
    Case("C10", "", ("config.json:2:3:", "a comment is not JSON"), json="{\n  // a\n}"),
    Case("C10", "", ("config.json:2:1:", "remove the trailing comma"), json='{"gradient_clipping": 1,\n}'),
    Case("C10", "", ("config.json:2:2:", "again (first on line 1)"),
         json='{"gradient_clipping": 1,\n "gradient_clipping": 2}'),
    Case("C10", "", ("config.json:1:1: must contain one JSON object {...}, got list",), json="[1]"),
    Case("C11", "", ("unknown key gradient_cliping; did you mean gradient_clipping?",), json={"gradient_cliping": 1}),
    Case("C11", "--hiden-size 4", ("unknown flag --hiden-size; did you mean --hidden-size?",)),
    Case("C12", "", ("train_batch_size must be a positive integer, got '8'",), json={"train_batch_size": "8"}),
    Case("C12", "--batch-size 0", ("--batch-size must be a positive integer, got 0",)),
    Case("C12", "--lr nan --gas -3 --num-layers 2.5", ("3 problems", "got nan", "got -3", "got '2.5'")),
    Case("C12", "--batch-size 999999999999999999", ("--batch-size must be a positive integer, got 9999",)),
    Case("C13", "--clip-grad 1", ("got --clip-grad 1 and gradient_clipping 0.5",), json={"gradient_clipping": 0.5}),
    Case("C13", "--batch-size 3", ("--batch-size 3", "gpu 2"), json={"train_micro_batch_size_per_gpu": 2}),
    Case("C13", "--bf16", ("--bf16", "fp16.enabled true, that is fp16"), json={"fp16": {"enabled": True}}),
    Case("C13", "--zero-stage 0", ("--zero-stage 0 and zero_optimization.stage",), 1,
         {"zero_optimization": {"stage": 1}}),
    Case("C15", "--device cpu --fp16", ("fp16 needs a GPU, got a CPU", "Use --bf16")),
    Case("C15", "--device cpu --distributed-backend nccl", ("nccl needs GPUs, got a CPU. Use gloo",)),
    Case("C17", "--warmup 1.5", ("--warmup must be a finite number of at least 0 and at most 1, got 1.5",)),
    Case("C17", "--lr-warmup-iters 200 --train-iters 100", ("got --lr-warmup-iters 200 and --lr-decay-iters 100",)),
    Case("C17", "--min-lr 1 --lr 0.5", ("--min-lr must not exceed --lr", "1 and --lr 0.5")),
    Case("C17", "--lr 0 --train-iters -1", ("--lr must be a finite number of more than 0", "got -1")),
    Case("C19", "--vocab-file /nowhere/v.json", ("--vocab-file must name a file that can be read, got /nowhere/v",)),
    Case("C19", "--tokenizer-path /nowhere/t", ("--tokenizer-path must name a file that can be read, got /nowhere/t",)),
    Case("C19", "--data-path /nowhere/d",
         ("cannot read /nowhere/d.idx and /nowhere/d.bin", "tools/preprocess_data.py")),
    Case("C21", "--num-lay 4", ("unknown flag --num-lay; did you mean --num-layers?",)),
    Case("C21", "--lr=", ("--lr needs a value", "got none. Write --lr VALUE")),
)  # fmt: skip


def error_message(case: Case, folder: Path) -> str:
    """Return what is said of ``case``, with its exit code if that is not 2; "taken" where nothing is."""
    arguments = f"{T5 if case.family == 't5' else GPT2} {case.line}".split()
    if case.json is not None:
        path = folder / "config.json"
        path.write_text(case.json if isinstance(case.json, str) else json.dumps(case.json))
        arguments += ["--deepspeed_config", str(path)]
    try:
        parse(arguments, world_size=case.world_size, env={}, family=case.family)
    except ConfigError as error:
        return str(error) if exit_code(error) == 2 else f"exit code {exit_code(error)}"
    return "taken"


def main() -> int:
    """Return how many cases are not told as they must be; each of them on standard error."""
    with tempfile.TemporaryDirectory() as folder:
        texts = [(case, error_message(case, Path(folder))) for case in CASES]
    failures = [
        f"{case.row} {case.line}: {text}\n"
        for case, text in texts
        if any(fragment not in text for fragment in case.fragments)
    ]
    sys.stderr.writelines(failures)
    sys.stdout.write(f"{len(texts)} cases, __debug__ {__debug__}, torch {'torch' in sys.modules}\n")
    return len(failures)


if __name__ == "__main__":
    sys.exit(main())
