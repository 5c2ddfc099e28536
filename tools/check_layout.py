"""Check that a layout computes the same losses and gradients as one process: same seed, data and global batch, in fp64.

    python tools/check_layout.py --model-parallel-size 2 --pipe-parallel-size 2
    python tools/check_layout.py --model-parallel-size 2 --pipe-parallel-size 2 --data-parallel-size 2 \\
        --num-layers 6 --hidden-size 96 --num-attention-heads 6 --steps 10 --fp32

    python tools/check_layout.py --pipe-parallel-size 2 --pipeline-chunks 2 --gas 8
    python tools/check_layout.py --context-parallel-size 2 --model llama --reset-position-ids --reset-attention-mask
    python tools/check_layout.py --data-parallel-size 2 --model llama --num-experts 4 --expert-model-parallel-size 2
    python tools/check_layout.py --model t5 --pipe-parallel-size 3 --enc-layers 2 --dec-layers 4 --pipeline-split-rank 1

    python tools/check_layout.py --model-parallel-size 2 --device cuda --distributed-backend gloo   # on one GPU

The tool accepts the flags of pretrain_gpt2.py that define the model, the batch and the optimizer, with --model t5 the
flags of pretrain_t5.py, and with --model bert the flags of pretrain_bert.py.

* Tokens are random unless --data-path, --train-data-path or --sft is given together with --tokenizer-path; --split
  works, too.
* Dropout is off unless --layout-independent-dropout is given, because its masks depend on the tensor layout by design.
* With --loss-average micro-batch, the losses depend on --batch-size, so all layouts that are compared must have the
  same one; the single process uses it, too. Context-parallel layouts match only if no token is masked.
* Several ranks on one GPU need --distributed-backend gloo (docs/accelerators.md); the single process uses it, too.
* --json writes the results to a file; --reference saves the results of the single process for the next start.

The exit code is 0 if all values are within their bounds, otherwise 1.
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
"""Type of family -> default flags of this tool."""
MORE_DEFAULTS = {"gpt2": " --hidden-bias", "llama": " --num-query-groups 2"}
"""Family -> additional default flags."""
DROPPED = "--layout-independent-dropout"
UNDROPPED = "--attention-dropout 0 --hidden-dropout 0".split()
"""Flags that are appended unless DROPPED is given."""
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
"""Flags of the layout that have no effect in one process or are rejected there."""
VOCAB_SIZE = 1009
BOUNDS = {  # (first loss, all losses, first gradient norm, gradients)
    "fp64": (1e-12, 1e-12, 1e-12, 1e-11),
    "fp32": (2e-6, 5e-5, 1e-6, 3e-6),
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes."""

    tensor: int
    pipe: int
    data: int
    context: int

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipe * self.data * self.context

    @property
    def flags(self) -> list[str]:
        """The sizes as flags of the processes."""
        sizes = ["--model-parallel-size", str(self.tensor), "--pipe-parallel-size", str(self.pipe)]
        return [*sizes, "--context-parallel-size", str(self.context)]


def main() -> int:
    """Compare the layout of the command line with one process; return the exit code."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # for this process, which computes nothing
    args, flags = own_parser().parse_known_args()
    user_flags = list(flags)
    pipe, context = max(args.pipe_parallel_size, 1), args.context_parallel_size
    layout = Layout(args.model_parallel_size, pipe, args.data_parallel_size, context)
    os.environ["MEGATRON_DEFAULTS"] = f"{defaults_of(args.model)} {os.environ.get('MEGATRON_DEFAULTS', '')}"
    flags = [*flags, f"--{args.dtype}", "--device", args.device, *([] if DROPPED in flags else UNDROPPED)]
    pipeline = [word for name in PIPELINE if (value := getattr(args, name)) is not None for word in (name, value)]
    backend = ["--distributed-backend", args.distributed_backend] if args.distributed_backend else []
    check_flags([*flags, *pipeline, *backend], layout, args.model, [*user_flags, *pipeline, *backend])
    with tempfile.TemporaryDirectory(prefix="check-layout-") as folder:
        job = (args.model, args.steps)
        reference = kept_reference(args, flags, layout.data)
        if reference is None:
            print(f"one process, {args.steps} steps in {args.dtype} ...", flush=True)
            (reference,) = run(Path(folder) / "one", Layout(1, 1, 1, 1), flags, *job, replicas=layout.data)
            keep_reference(args, flags, layout.data, reference)
        sizes = f"tensor {layout.tensor} x pipe {layout.pipe} x data {layout.data}"
        sizes += f" x context {layout.context}" if layout.context > 1 else ""
        print(f"{layout.world_size} processes: {' '.join([sizes, *pipeline])} ...", flush=True)
        traces = run(Path(folder) / "many", layout, [*flags, *pipeline, *backend], *job, replicas=1)
    return report(reference, traces, args.dtype, args.json)


def defaults_of(model: str) -> str:
    """Return the default flags for a family."""
    from megatron.models.registry import FAMILIES

    return DEFAULTS[FAMILIES[model].kind] + MORE_DEFAULTS.get(model, "")


def own_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags that belong to this tool only."""
    from megatron.models.registry import FAMILIES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", choices=tuple(FAMILIES), default="gpt2", help="model family (default: gpt2)")
    parser.add_argument("--model-parallel-size", "--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipe-parallel-size", "--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument(
        "--data-parallel-size",
        type=int,
        default=1,
        help="number of replicas; the world size is the product of the four sizes",
    )
    parser.add_argument("--context-parallel-size", type=int, default=1)
    for flag in PIPELINE:
        parser.add_argument(flag, dest=flag, help="same as in training")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="device of all processes: cpu, cuda or a plug-in's")
    parser.add_argument("--distributed-backend", choices=("nccl", "gloo"), help="backend of the layout's processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="FILE",
        help="load the results of the single process from this file if it exists, otherwise save them to it",
    )
    parser.add_argument("--fp32", dest="dtype", action="store_const", const="fp32", default="fp64")
    return parser


def check_flags(flags: list[str], layout: Layout, model: str, given: list[str] | None = None) -> None:
    """Exit with code 2 and the reasons if the layout is rejected; print the limits of --loss-average micro-batch.

    Args:
        given: those of ``flags`` that the user typed; None for all of them.
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
    """Yield the limits of the comparison under --loss-average micro-batch."""
    if config.model.loss_average != "micro-batch":
        return
    yield (
        f"--loss-average micro-batch: both runs use the same micro-batches of {config.batch.batch_size} samples. With "
        "another --batch-size, the losses differ if tokens are masked"
    )
    if config.parallel.context_parallel_size > 1:
        yield (
            "each context rank averages the loss of its chunk as a separate micro-batch, so the losses differ from one "
            "process if tokens are masked. Use --loss-average token to compare them"
        )


def explained(message: str, given: list[str]) -> str:
    """Return the error message with a hint for each flag in it that was added by this tool."""
    message = message.replace("got --data-path none", "got random tokens (no --data-path, --train-data-path or --sft)")
    tool_flags = {
        "--fp64": "this tool computes in fp64 by default; use --fp32 for fp32",
        "--eval-iters": "this tool disables evaluation",
    }
    hints = [hint for flag, hint in tool_flags.items() if flag not in given and re.search(rf"{flag}(?![\w-])", message)]
    return f"{message} ({'; '.join(hints)})" if hints else message


def parse_as(model: str, flags: list[str], world_size: int) -> Any:
    """Return the configuration that the model's own program would use."""
    from megatron.arguments import parse

    return parse(flags, world_size=world_size, family=model, defaults=getattr(program_of(model), "DEFAULTS", None))


def reference_key(own: argparse.Namespace, flags: list[str], replicas: int) -> str:
    """Return a key of all settings that affect the results of the single process, as JSON text."""
    config = parse_as(own.model, with_data(flags, own.model), 1)
    config = replace(config, batch=replace(config.batch, gas=config.batch.gas * replicas))
    return json.dumps([own.model, own.steps, config.to_dict()], sort_keys=True, default=str)


def kept_reference(own: argparse.Namespace, flags: list[str], replicas: int) -> Any:
    """Return the trace of the single process from the file of --reference, or None without such a file.

    Raises:
        SystemExit: the file belongs to another model, batch or device.
    """
    if own.reference is None or not own.reference.exists():
        return None
    if own.reference.with_suffix(".json").read_text(encoding="utf-8") != reference_key(own, flags, replicas):
        raise SystemExit(f"--reference {own.reference} was saved with other flags. Use another file")
    return read_trace(own.reference)


def keep_reference(own: argparse.Namespace, flags: list[str], replicas: int, trace: Any) -> None:
    """Save the trace of the single process for later starts if --reference is given."""
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
        replicas: number of replicas in the compared layout if this run is the single process, which runs the
            micro-batches of all of them; otherwise 1.
    """
    out.mkdir()
    command = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", str(layout.world_size)]
    device = flags[flags.index("--device") + 1]
    if device == "cpu":  # forking is not safe after a process has initialized a device
        command += ["--preload", "torch,deepspeed,torch._inductor.codecache"]
    command += [__file__, "--worker", str(out), model, str(steps), str(replicas), *flags]
    command += layout.flags
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = os.environ | {"PYTHONPATH": path, "DS_ACCELERATOR": device, "OMP_NUM_THREADS": "1"}
    if device not in ("cpu", "cuda"):  # DeepSpeed finds the device by its plug-in
        del env["DS_ACCELERATOR"]
    process = subprocess.run(command, env=env, check=False)
    if process.returncode:
        raise SystemExit(process.returncode)
    return [read_trace(out / f"rank-{rank}") for rank in range(layout.world_size)]


def read_trace(path: Path) -> Any:
    """Load the trace that a rank saved."""
    import torch

    from megatron.mpu.shard import Shard
    from megatron.training.parity import Trace

    with torch.serialization.safe_globals([Trace, Shard]):
        return torch.load(path, weights_only=True)


def worker(out: Path, model: str, steps: int, replicas: int, flags: list[str]) -> None:
    """Train on one rank and save its trace."""
    import torch

    from megatron.runtime.exit_guard import guard
    from megatron.training import configure_device, initialize

    config = parse_as(model, with_data(flags, model), int(os.environ["WORLD_SIZE"]))
    configure_device(config)
    gas = config.batch.gas * (1 if config.batch.requested_global_batch_size else replicas)
    config = replace(config, batch=replace(config.batch, gas=gas))

    def train() -> None:
        from megatron.training.parity import trace_steps

        world, program = initialize.start(config), program_of(model)
        settings, tokenizer, dataset = with_dataset(config, program)
        providers = (program.model_provider, program.forward_step)
        trace = trace_steps(settings, world, dataset, *providers, steps=steps, tokenizer=tokenizer)
        torch.save(trace, out / f"rank-{world.rank}")
        initialize.stop()

    guard(train, lambda: f"rank {os.environ.get('RANK', '0')}")


def with_data(flags: list[str], model: str) -> list[str]:
    """Add flags that disable evaluation and, if no flag names data, select random tokens (``--data-path none``)."""
    from megatron.arguments import config_file
    from megatron.arguments.flag_values import scan
    from megatron.config.data import PATHS

    scanned = scan(flags, (), model)
    config_file.take(scanned)
    flags = [*flags, "--eval-iters", "0"]
    return flags if scanned.values.keys() & {*PATHS, "sft"} else [*flags, "--data-path", "none"]


def with_dataset(config: Any, program: Any) -> tuple[Any, Any, Any]:
    """Return the configuration with its vocabulary size, the tokenizer, and the training data.

    The data are the user's token files, or random tokens without a tokenizer.
    """
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
    """Print the observed and allowed values and write them to ``file``; return 0 if all are within their bounds."""
    from rich.table import Table

    from megatron.console import print_table
    from megatron.training.parity import compare

    differences = compare(one, many)
    first_loss_bound, loss_bound, norm_bound, gradient_bound = BOUNDS[dtype]
    rows = [
        ("loss of the first step, absolute", differences.first_loss, first_loss_bound),
        ("loss of any step, absolute", differences.loss, loss_bound),
        ("gradient norm of the first step, relative", differences.first_norm, norm_bound),
        (f"worst gradient ({differences.worst}), relative", differences.gradient, gradient_bound),
    ]
    table = Table("value", "observed", "allowed", "", title=f"{len(many)} processes compared with one, {dtype}")
    for name, observed, allowed in rows:
        table.add_row(name, f"{observed:.2e}", f"{allowed:.0e}", "ok" if observed <= allowed else "TOO FAR")
    print_table(table)
    is_equal = all(observed <= allowed for _, observed, allowed in rows)
    if file is not None:
        names = ("first_loss", "loss", "first_norm", "gradient")
        values = {name: {"observed": row[1], "allowed": row[2]} for name, row in zip(names, rows, strict=True)}
        results = {"is_equal": is_equal, "dtype": dtype, "ranks": len(many), "worst": differences.worst, "seen": values}
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("verdict: equal" if is_equal else "verdict: NOT EQUAL. Please report the command line and this table.")
    return 0 if is_equal else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
    else:
        sys.exit(main())
