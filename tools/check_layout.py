"""Watch your own layout give the numbers of one process: the same seed, data and global batch, in fp64.

    python tools/check_layout.py --model-parallel-size 2 --pipe-parallel-size 2
    python tools/check_layout.py --model-parallel-size 2 --pipe-parallel-size 2 --data-parallel-size 2 \\
        --num-layers 6 --hidden-size 96 --num-attention-heads 6 --steps 10 --fp32

    python tools/check_layout.py --pipe-parallel-size 2 --pipeline-chunks 2 --gas 8
    python tools/check_layout.py --context-parallel-size 2 --model llama --reset-position-ids --reset-attention-mask
    python tools/check_layout.py --data-parallel-size 2 --model llama --num-experts 4 --expert-model-parallel-size 2
    python tools/check_layout.py --model t5 --pipe-parallel-size 3 --enc-layers 2 --dec-layers 4 --pipeline-split-rank 1

    python tools/check_layout.py --model-parallel-size 2 --device cuda --distributed-backend gloo   # on one GPU

All flags of pretrain_gpt2.py, or with --model t5 of pretrain_t5.py and with --model bert of pretrain_bert.py
that shape the model, the batch and the optimizer work. Tokens are random unless --data-path, --train-data-path or --sft
is given, with --tokenizer-path; --split works too. Dropout is off, for its masks differ between tensor slices by
design, unless --layout-independent-dropout is given. With --loss-average micro-batch the one process takes the same
micro-batches (--batch-size samples each), and so must every layout that is compared; context ranks equal it only where
no token is masked. Several ranks on one GPU need --distributed-backend gloo (docs/accelerators.md); the one process
runs on the same device.
--json leaves what was seen in a file; --reference keeps what the one process showed for the next start.
Ends with code 0 if everything lies within its bound, else 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SIZES = "--hidden-size 64 --num-attention-heads 4 --batch-size 2 --gas 2 --lr 1e-3 "
ONE_SIDE = SIZES + "--num-layers 4 --seq-length 32 --init-method-std 0.05"
DEFAULTS = {
    "decoder": ONE_SIDE,
    "encoder": ONE_SIDE,
    "encoder-decoder": SIZES + "--num-layers 2 --enc-seq-length 32",
}
"""Kind of family -> flags that apply where the user gives no others."""
MORE_DEFAULTS = {"gpt2": " --hidden-bias", "llama": " --num-query-groups 2"}
"""Family -> further ones."""
DROPPED = "--layout-independent-dropout"
UNDROPPED = "--attention-dropout 0 --hidden-dropout 0".split()
"""What comes last where that flag is not given."""
PIPELINE = (
    "--pipeline-schedule",
    "--pipeline-chunks",
    "--num-layers-per-virtual-pipeline-stage",
    "--pipeline-split-rank",
    "--cp-comm-type",
    "--zero-stage",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)
"""Flags that the one process cannot take, or has nothing to do for."""
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
    context: int

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipe * self.data * self.context

    @property
    def flags(self) -> list[str]:
        """The sizes, as the processes are told them."""
        sizes = ["--model-parallel-size", str(self.tensor), "--pipe-parallel-size", str(self.pipe)]
        return [*sizes, "--context-parallel-size", str(self.context)]


def main() -> int:
    """Compare the layout of the command line with one process; return the exit code."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # of this process, which computes nothing
    own, flags = own_parser().parse_known_args()
    given = list(flags)
    pipe, context = max(own.pipe_parallel_size, 1), own.context_parallel_size
    layout = Layout(own.model_parallel_size, pipe, own.data_parallel_size, context)
    os.environ["MEGATRON_DEFAULTS"] = f"{defaults_of(own.model)} {os.environ.get('MEGATRON_DEFAULTS', '')}"
    flags = [*flags, f"--{own.dtype}", "--device", own.device, *([] if DROPPED in flags else UNDROPPED)]
    pipeline = [word for name in PIPELINE if (value := getattr(own, name)) is not None for word in (name, value)]
    backend = ["--distributed-backend", own.distributed_backend] if own.distributed_backend else []
    check_flags([*flags, *pipeline, *backend], layout, own.model, [*given, *pipeline, *backend])
    with tempfile.TemporaryDirectory(prefix="check-layout-") as folder:
        job = (own.model, own.steps)
        one = kept_reference(own, flags, layout.data)
        if one is None:
            print(f"one process, {own.steps} steps in {own.dtype} ...", flush=True)
            (one,) = run(Path(folder) / "one", Layout(1, 1, 1, 1), flags, *job, replicas=layout.data)
            keep_reference(own, flags, layout.data, one)
        sizes = f"tensor {layout.tensor} x pipe {layout.pipe} x data {layout.data}"
        sizes += f" x context {layout.context}" if layout.context > 1 else ""
        print(f"{layout.world_size} processes: {' '.join([sizes, *pipeline])} ...", flush=True)
        many = run(Path(folder) / "many", layout, [*flags, *pipeline, *backend], *job, replicas=1)
    return report(one, many, own.dtype, own.json)


def defaults_of(model: str) -> str:
    """Return the flags of a family that apply where the user gives no others."""
    from megatron.models.registry import FAMILIES

    return DEFAULTS[FAMILIES[model].kind] + MORE_DEFAULTS.get(model, "")


def own_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags that are this tool's own."""
    from megatron.models.registry import FAMILIES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", choices=tuple(FAMILIES), default="gpt2", help="which model (default: gpt2)")
    parser.add_argument("--model-parallel-size", "--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipe-parallel-size", "--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument(
        "--data-parallel-size", type=int, default=1, help="replicas; the world is the product of all four"
    )
    parser.add_argument("--context-parallel-size", type=int, default=1)
    for flag in PIPELINE:
        parser.add_argument(flag, dest=flag, help="as in training")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="of all processes: cpu, cuda or a plug-in's (default: cpu)")
    parser.add_argument("--distributed-backend", choices=("nccl", "gloo"), help="of the processes of the layout")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was seen to this file")
    parser.add_argument(
        "--reference", type=Path, metavar="FILE", help="read the one process's numbers from here, or leave them here"
    )
    parser.add_argument("--fp32", dest="dtype", action="store_const", const="fp32", default="fp64")
    return parser


def check_flags(flags: list[str], layout: Layout, model: str, given: list[str] | None = None) -> None:
    """Exit with code 2 and the reasons if the layout is rejected; print the limits of --loss-average micro-batch.

    Args:
        given: flags of the user among ``flags``; None: all.
    """
    from megatron.errors import ConfigError

    try:
        config = parse_as(model, [*with_data(flags, model), *layout.flags], layout.world_size)
    except ConfigError as error:
        print(explained(str(error), given or flags), file=sys.stderr)
        raise SystemExit(2) from None
    for line in average_notes(config):
        print(line, flush=True)


def average_notes(config: Any) -> Iterator[str]:
    """Yield what the comparison cannot show under --loss-average micro-batch."""
    if config.model.loss_average != "micro-batch":
        return
    yield (
        f"--loss-average micro-batch: both runs take the same micro-batches of {config.batch.batch_size} samples; with "
        "another --batch-size the losses differ where tokens are masked"
    )
    if config.parallel.context_parallel_size > 1:
        yield (
            "the part of each context rank counts as a micro-batch, so masked tokens make the losses differ from one "
            "process; --loss-average token compares them"
        )


def explained(message: str, given: list[str]) -> str:
    """Return the message of an error with the tool's own settings in place of flags that the user did not give."""
    message = message.replace("got --data-path none", "got random tokens (no --data-path, --train-data-path or --sft)")
    own = {"--fp64": "this tool computes in fp64; --fp32 is the other choice", "--eval-iters": "this tool only trains"}
    hints = [hint for flag, hint in own.items() if flag not in given and re.search(rf"{flag}(?![\w-])", message)]
    return f"{message} ({'; '.join(hints)})" if hints else message


def parse_as(model: str, flags: list[str], world_size: int) -> Any:
    """Return the configuration of the model's own program."""
    from megatron.arguments import parse

    return parse(flags, world_size=world_size, family=model, defaults=getattr(program_of(model), "DEFAULTS", None))


def reference_key(own: argparse.Namespace, flags: list[str], replicas: int) -> str:
    """Return what the numbers of the one process depend on."""
    config = parse_as(own.model, with_data(flags, own.model), 1)
    config = replace(config, batch=replace(config.batch, gas=config.batch.gas * replicas))
    return json.dumps([own.model, own.steps, config.to_dict()], sort_keys=True, default=str)


def kept_reference(own: argparse.Namespace, flags: list[str], replicas: int) -> Any:
    """Return the trace of the one process from an earlier start, or None.

    Raises:
        SystemExit: the file is of another model, batch or device.
    """
    if own.reference is None or not own.reference.exists():
        return None
    if own.reference.with_suffix(".json").read_text(encoding="utf-8") != reference_key(own, flags, replicas):
        raise SystemExit(f"--reference must be of the same flags, got {own.reference} of others. Name another file")
    return read_trace(own.reference)


def keep_reference(own: argparse.Namespace, flags: list[str], replicas: int, trace: Any) -> None:
    """Leave the trace of the one process for later starts, if --reference says where."""
    if own.reference is not None:
        import torch

        own.reference.with_suffix(".json").write_text(reference_key(own, flags, replicas), encoding="utf-8")
        torch.save(trace, own.reference)


def program_of(model: str) -> Any:
    """Return the module ``pretrain_<model>``."""
    from megatron.models.registry import FAMILIES

    return importlib.import_module(FAMILIES[model].program.removesuffix(".py").replace("/", "."))


def run(out: Path, layout: Layout, flags: list[str], model: str, steps: int, replicas: int) -> list[Any]:
    """Train in ``layout`` through the launcher; return each rank's trace.

    Args:
        replicas: one process takes the micro-batches of so many replicas in turn.
    """
    out.mkdir()
    command = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", str(layout.world_size)]
    device = flags[flags.index("--device") + 1]
    if device == "cpu":  # a process that has touched a device must not fork
        command += ["--preload", "torch,deepspeed,torch._inductor.codecache"]
    command += [__file__, "--worker", str(out), model, str(steps), str(replicas), *flags]
    command += layout.flags
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = os.environ | {"PYTHONPATH": path, "DS_ACCELERATOR": device, "OMP_NUM_THREADS": "1"}
    if device not in ("cpu", "cuda"):  # DeepSpeed learns of it by its plug-in
        del env["DS_ACCELERATOR"]
    done = subprocess.run(command, env=env, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return [read_trace(out / f"rank-{rank}") for rank in range(layout.world_size)]


def read_trace(path: Path) -> Any:
    """Return what a rank wrote."""
    import torch

    from megatron.mpu.shard import Shard
    from megatron.training.parity import Trace

    with torch.serialization.safe_globals([Trace, Shard]):
        return torch.load(path, weights_only=True)


def worker(out: Path, model: str, steps: int, replicas: int, flags: list[str]) -> None:
    """What each rank does."""
    import torch

    from megatron.runtime.exit_guard import guard
    from megatron.training import configure_device, initialize

    config = parse_as(model, with_data(flags, model), int(os.environ["WORLD_SIZE"]))
    configure_device(config)
    gas = config.batch.gas * (1 if config.batch.requested_global_batch_size else replicas)
    config = replace(config, batch=replace(config.batch, gas=gas))

    def train() -> None:
        from megatron.training.parity import trace_steps

        here, program = initialize.start(config), program_of(model)
        settings, tokenizer, dataset = with_dataset(config, program)
        providers = (program.model_provider, program.forward_step)
        trace = trace_steps(settings, here, dataset, *providers, steps=steps, tokenizer=tokenizer)
        torch.save(trace, out / f"rank-{here.rank}")
        initialize.stop()

    guard(train, lambda: f"rank {os.environ.get('RANK', '0')}")


def with_data(flags: list[str], model: str) -> list[str]:
    """Return the flags without evaluations, and with ``--data-path none`` (random tokens) if no flag names data."""
    from megatron.arguments import config_file
    from megatron.arguments.flag_values import scan
    from megatron.config.data import PATHS

    found = scan(flags, (), model)
    config_file.take(found)
    flags = [*flags, "--eval-iters", "0"]
    return flags if found.values.keys() & {*PATHS, "sft"} else [*flags, "--data-path", "none"]


def with_dataset(config: Any, program: Any) -> tuple[Any, Any, Any]:
    """Return the configuration with its vocabulary, the tokenizer, and the user's token files or random tokens."""
    from megatron.training import global_vars
    from megatron.training.mock_data import random_data
    from megatron.training.vocabulary import with_tokenizer

    if config.data.data_path == "none":
        config = config.with_vocab(config.model.vocab_size or VOCAB_SIZE)
        return config, None, random_data(config)
    tokenizer, config = with_tokenizer(config)
    global_vars.set_current(config, tokenizer, None)
    train, _, _ = program.train_valid_test_datasets_provider([1, 0, 0])
    return config, tokenizer, train


def report(one: Any, many: list[Any], dtype: str, file: Path | None = None) -> int:
    """Print observed beside allowed, and write them to ``file``; return 0 if all is within its bound."""
    from rich.table import Table

    from megatron.console import print_table
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
    print_table(table)
    is_equal = all(observed <= allowed for _, observed, allowed in rows)
    if file is not None:
        names = ("first_loss", "loss", "first_norm", "gradient")
        seen = {name: {"observed": row[1], "allowed": row[2]} for name, row in zip(names, rows, strict=True)}
        results = {"is_equal": is_equal, "dtype": dtype, "ranks": len(many), "worst": found.worst, "seen": seen}
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("verdict: equal" if is_equal else "verdict: NOT EQUAL. Please report the command line and this table.")
    return 0 if is_equal else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
    else:
        sys.exit(main())
