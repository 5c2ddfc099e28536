"""Watch your own layout give the numbers of one process: the same seed, data and global batch, in fp64.

    python tools/check_layout.py --model-parallel-size 2 --pipe-parallel-size 2
    python tools/check_layout.py --model-parallel-size 2 --pipe-parallel-size 2 --data-parallel-size 2 \\
        --num-layers 6 --hidden-size 96 --num-attention-heads 6 --steps 10 --fp32

    python tools/check_layout.py --pipe-parallel-size 2 --pipeline-chunks 2 --gas 8

All flags of pretrain_gpt2.py that shape the model, the batch and the optimizer work. Tokens are random unless
--data-path and --tokenizer-path are given. Dropout is off: its masks differ between tensor slices by design.
Ends with code 0 if everything lies within its bound, else 1.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

DEFAULTS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --batch-size 2 --gas 2 --lr 1e-3 "
    "--hidden-bias --init-method-std 0.05"
).split()
FORCED = "--attention-dropout 0 --hidden-dropout 0 --device cpu".split()
PIPELINE = ("--pipeline-schedule", "--pipeline-chunks", "--num-layers-per-virtual-pipeline-stage")
"""Flags that the one process cannot take."""
VOCAB_SIZE = 1009
BOUNDS = {  # (first loss, all losses, first gradient norm, gradients)
    "fp64": (1e-12, 1e-12, 1e-12, 1e-11),
    "fp32": (2e-6, 5e-5, 1e-6, 3e-6),
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and the accumulation that gives one process the same global batch."""

    tensor: int
    pipe: int
    data: int

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipe * self.data


def main() -> int:
    """Compare the layout of the command line with one process; return the exit code."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    own, flags = own_parser().parse_known_args()
    layout = Layout(own.model_parallel_size, max(own.pipe_parallel_size, 1), own.data_parallel_size)
    flags = [*DEFAULTS, *flags, f"--{own.dtype}", *FORCED]
    pipeline = [word for name in PIPELINE if (value := getattr(own, name)) is not None for word in (name, value)]
    check_flags([*flags, *pipeline], layout)
    with tempfile.TemporaryDirectory(prefix="check-layout-") as folder:
        print(f"one process, {own.steps} steps in {own.dtype} ...", flush=True)
        one = run(Path(folder) / "one", Layout(1, 1, 1), flags, own.steps, replicas=layout.data)
        sizes = f"tensor {layout.tensor} x pipe {layout.pipe} x data {layout.data}"
        print(f"{layout.world_size} processes: {' '.join([sizes, *pipeline])} ...", flush=True)
        many = run(Path(folder) / "many", layout, [*flags, *pipeline], own.steps, replicas=1)
    return report(one[0], many, own.dtype)


def own_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags that are this tool's own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model-parallel-size", "--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipe-parallel-size", "--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument(
        "--data-parallel-size", type=int, default=1, help="replicas; the world is the product of all three"
    )
    for flag in PIPELINE:
        parser.add_argument(flag, dest=flag, help="as for pretrain_gpt2.py")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--fp32", dest="dtype", action="store_const", const="fp32", default="fp64")
    return parser


def check_flags(flags: list[str], layout: Layout) -> None:
    """End with code 2 and the reasons when the layout cannot be."""
    from megatron.config import parse
    from megatron.errors import ConfigError

    sizes = [f"--model-parallel-size={layout.tensor}", f"--pipe-parallel-size={layout.pipe}"]
    try:
        parse([*flags, *sizes, "--data-path", "none"], world_size=layout.world_size)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def run(out: Path, layout: Layout, flags: list[str], steps: int, replicas: int) -> list[Any]:
    """Train in ``layout`` through the launcher; return each rank's trace.

    Args:
        replicas: one process takes the micro-batches of so many replicas in turn.
    """
    out.mkdir()
    command = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", str(layout.world_size)]
    command += ["--preload", "torch,deepspeed,torch._dynamo", __file__, "--worker", str(out), str(steps), str(replicas)]
    command += [*flags, "--model-parallel-size", str(layout.tensor), "--pipe-parallel-size", str(layout.pipe)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = os.environ | {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return [pickle.loads((out / f"rank-{rank}").read_bytes()) for rank in range(layout.world_size)]


def worker(out: Path, steps: int, replicas: int, flags: list[str]) -> None:
    """What each rank does."""
    import pretrain_gpt2
    from megatron.config import parse
    from megatron.training import settle, world
    from megatron.training.failure import guard

    config = parse(with_data(flags), world_size=int(os.environ["WORLD_SIZE"]))
    settle(config)
    config = replace(config, batch=replace(config.batch, gas=config.batch.gas * replicas))

    def train() -> None:
        from megatron.training.parity import trace_steps

        here = world.start(config)
        providers = (pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
        settings, dataset = with_dataset(config)
        trace = trace_steps(settings, here, dataset, *providers, steps=steps)
        (out / f"rank-{here.rank}").write_bytes(pickle.dumps(trace))
        world.stop()

    guard(train, lambda: f"rank {os.environ.get('RANK', '0')}")


def with_data(flags: list[str]) -> list[str]:
    """Return the flags with a data path, which is needed but not read for random tokens."""
    return flags if "--data-path" in flags else [*flags, "--data-path", "none"]


def with_dataset(config: Any) -> tuple[Any, Any]:
    """Return the configuration with its vocabulary, and the data set: the user's token files or random tokens."""
    from megatron.data import build_train_valid_test
    from megatron.training.parity import RandomTokens
    from megatron.training.plan import with_tokenizer

    length, seed = config.batch.seq_length, config.run.seed
    if config.data.data_path == "none":
        return config.with_vocab(config.model.vocab_size or VOCAB_SIZE), RandomTokens(
            config.model.vocab_size or VOCAB_SIZE, length, seed
        )
    tokenizer, config = with_tokenizer(config)
    train, _, _ = build_train_valid_test(
        data_path=config.data.data_path,
        split=config.data.split,
        seq_length=length,
        seed=seed,
        vocab_size=config.model.vocab_size,
        needed=(True, False, False),
        tokenizer_identity=getattr(tokenizer, "identity", None),
    )
    return config, train


def report(one: Any, many: list[Any], dtype: str) -> int:
    """Print observed beside allowed; return 0 if all is within its bound."""
    from rich.console import Console
    from rich.table import Table

    from megatron.training.parity import compare

    found = compare(one, many)
    first, every, norm, gradient = BOUNDS[dtype]
    rows = [
        ("loss of the first step, absolute", found.first_loss, first),
        ("loss of any step, absolute", found.loss, every),
        ("gradient norm of the first step, relative", found.first_norm, norm),
        (f"worst gradient ({found.worst}), relative", found.gradient, gradient),
    ]
    table = Table("what", "observed", "allowed", "", title=f"{len(many)} processes against one, {dtype}")
    for name, observed, allowed in rows:
        table.add_row(name, f"{observed:.2e}", f"{allowed:.0e}", "ok" if observed <= allowed else "TOO FAR")
    Console().print(table)
    is_equal = all(observed <= allowed for _, observed, allowed in rows)
    print("verdict: equal" if is_equal else "verdict: NOT EQUAL. Please report the command line and this table.")
    return 0 if is_equal else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
    else:
        sys.exit(main())
