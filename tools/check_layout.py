"""Check that a layout computes the same losses and gradients as one process: same seed, data and global batch, in fp64.

    python tools/check_layout.py --model-parallel-size 2 --pipe-parallel-size 2
    python tools/check_layout.py --model-parallel-size 2 --pipe-parallel-size 2 --data-parallel-size 2 \\
        --num-layers 6 --hidden-size 96 --num-attention-heads 6 --steps 10 --fp32

    python tools/check_layout.py --pipe-parallel-size 2 --pipeline-chunks 2 --gas 8
    python tools/check_layout.py --context-parallel-size 2 --model llama --reset-position-ids --reset-attention-mask
    python tools/check_layout.py --data-parallel-size 2 --model llama --num-experts 4 --expert-model-parallel-size 2
    python tools/check_layout.py --pipe-parallel-size 2 --context-parallel-size 2 --model llama --mtp-num-layers 2
    python tools/check_layout.py --model t5 --pipe-parallel-size 3 --enc-layers 2 --dec-layers 4 --pipeline-split-rank 1

    python tools/check_layout.py --model-parallel-size 2 --device cuda --distributed-backend gloo   # on one GPU

The tool accepts the flags of pretrain_gpt2.py that define the model, the batch and the optimizer, with --model t5 the
flags of pretrain_t5.py, and with --model bert the flags of pretrain_bert.py.

* Tokens are random unless --data-path, --train-data-path or --sft is given together with --tokenizer-path; --split
  works, too.
* Dropout is off unless --layout-independent-dropout is given, because its masks depend on the tensor layout by design.
* With --loss-average micro-batch, the losses depend on --batch-size, so all layouts that are compared must have the
  same one; the single process uses it, too.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SIZE_FLAGS = "--hidden-size 64 --num-attention-heads 4 --batch-size 2 --gas 2 --lr 1e-3 "
SINGLE_STACK_FLAGS = SIZE_FLAGS + "--num-layers 4 --seq-length 32 --init-method-std 0.05"
DEFAULT_FLAGS = {
    "decoder": SINGLE_STACK_FLAGS,
    "encoder": SINGLE_STACK_FLAGS,
    "encoder-decoder": SIZE_FLAGS + "--num-layers 2 --enc-seq-length 32",
}
"""Type of family -> default flags of this tool."""
FAMILY_FLAGS = {"gpt2": " --hidden-bias", "llama": " --num-query-groups 2"}
"""Family -> additional default flags."""
DROPOUT_FLAG = "--layout-independent-dropout"
NO_DROPOUT_FLAGS = "--attention-dropout 0 --hidden-dropout 0".split()
"""Flags that are appended unless ``DROPOUT_FLAG`` is set."""
LAYOUT_FLAGS = (
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
        size_flags = ["--model-parallel-size", str(self.tensor), "--pipe-parallel-size", str(self.pipe)]
        return [*size_flags, "--context-parallel-size", str(self.context)]


def main() -> int:
    """Compare the layout of the command line with one process; return the exit code."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # for this process, which computes nothing
    args, flags = make_tool_parser().parse_known_args()
    user_flags = list(flags)
    pipe, context = max(args.pipe_parallel_size, 1), args.context_parallel_size
    layout = Layout(args.model_parallel_size, pipe, args.data_parallel_size, context)
    os.environ["MEGATRON_DEFAULTS"] = f"{default_flags(args.model, flags)} {os.environ.get('MEGATRON_DEFAULTS', '')}"
    flags = [*flags, f"--{args.dtype}", "--device", args.device, *([] if DROPOUT_FLAG in flags else NO_DROPOUT_FLAGS)]
    layout_flags = [
        word for name in LAYOUT_FLAGS if (value := getattr(args, name)) is not None for word in (name, value)
    ]
    backend_flags = ["--distributed-backend", args.distributed_backend] if args.distributed_backend else []
    check_flags(
        [*flags, *layout_flags, *backend_flags], layout, args.model, [*user_flags, *layout_flags, *backend_flags]
    )
    with tempfile.TemporaryDirectory(prefix="check-layout-") as folder:
        job = (args.model, args.steps)
        reference = load_reference(args, flags, layout.data)
        if reference is None:
            print(f"one process, {args.steps} steps in {args.dtype} ...", flush=True)
            (reference,) = run(Path(folder) / "one", Layout(1, 1, 1, 1), flags, *job, num_replicas=layout.data)
            save_reference(args, flags, layout.data, reference)
        layout_text = f"tensor {layout.tensor} x pipe {layout.pipe} x data {layout.data}"
        layout_text += f" x context {layout.context}" if layout.context > 1 else ""
        print(f"{layout.world_size} processes: {' '.join([layout_text, *layout_flags])} ...", flush=True)
        traces = run(Path(folder) / "many", layout, [*flags, *layout_flags, *backend_flags], *job, num_replicas=1)
    return report(reference, traces, args.dtype, args.json)


def default_flags(model: str, flags: Sequence[str]) -> str:
    """Return the default flags for a family; multi-latent attention has no query groups."""
    from megatron.models.registry import FAMILIES

    family_flags = "" if "--multi-latent-attention" in flags else FAMILY_FLAGS.get(model, "")
    return DEFAULT_FLAGS[FAMILIES[model].model_type] + family_flags


def make_tool_parser() -> argparse.ArgumentParser:
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
    for flag in LAYOUT_FLAGS:
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


def check_flags(flags: list[str], layout: Layout, model: str, user_flags: list[str] | None = None) -> None:
    """Exit with code 2 and the reasons if the layout is rejected; print the limits of --loss-average micro-batch.

    Args:
        user_flags: those of ``flags`` that the user typed; None for all of them.
    """
    from megatron.errors import ConfigError

    try:
        config = parse_config(model, [*add_data_flags(flags, model), *layout.flags], layout.world_size)
    except ConfigError as error:
        print(explain_error(str(error), user_flags or flags), file=sys.stderr)
        raise SystemExit(2) from None
    for line in loss_average_notes(config):
        print(line, flush=True)


def loss_average_notes(config: Any) -> Iterator[str]:
    """Yield the limits of the comparison under --loss-average micro-batch."""
    if config.model.loss_average == "micro-batch":
        yield (
            f"--loss-average micro-batch: both runs use the same micro-batches of {config.batch.batch_size} samples. "
            "With another --batch-size, the losses differ if tokens are masked"
        )


def explain_error(message: str, user_flags: list[str]) -> str:
    """Return the error message with a hint for each flag in it that was added by this tool."""
    message = message.replace("got --data-path none", "got random tokens (no --data-path, --train-data-path or --sft)")
    tool_flags = {
        "--fp64": "this tool computes in fp64 by default; use --fp32 for fp32",
        "--eval-iters": "this tool disables evaluation",
    }
    hints = [
        hint for flag, hint in tool_flags.items() if flag not in user_flags and re.search(rf"{flag}(?![\w-])", message)
    ]
    return f"{message} ({'; '.join(hints)})" if hints else message


def parse_config(model: str, flags: list[str], world_size: int) -> Any:
    """Return the configuration that the model's own program would use."""
    from megatron.arguments import parse

    return parse(flags, world_size=world_size, family=model, defaults=getattr(load_program(model), "DEFAULTS", None))


def reference_key(args: argparse.Namespace, flags: list[str], num_replicas: int) -> str:
    """Return a key of all settings that affect the results of the single process, as JSON text."""
    config = parse_config(args.model, add_data_flags(flags, args.model), 1)
    config = replace(config, batch=replace(config.batch, gas=config.batch.gas * num_replicas))
    return json.dumps([args.model, args.steps, config.to_dict()], sort_keys=True, default=str)


def load_reference(args: argparse.Namespace, flags: list[str], num_replicas: int) -> Any:
    """Return the trace of the single process from the file of --reference, or None without such a file.

    Raises:
        SystemExit: the file belongs to another model, batch or device.
    """
    if args.reference is None or not args.reference.exists():
        return None
    if args.reference.with_suffix(".json").read_text(encoding="utf-8") != reference_key(args, flags, num_replicas):
        raise SystemExit(f"--reference {args.reference} was saved with other flags. Use another file")
    return read_trace(args.reference)


def save_reference(args: argparse.Namespace, flags: list[str], num_replicas: int, trace: Any) -> None:
    """Save the trace of the single process for later starts if --reference is given."""
    if args.reference is not None:
        import torch

        args.reference.with_suffix(".json").write_text(reference_key(args, flags, num_replicas), encoding="utf-8")
        torch.save(trace, args.reference)


def load_program(model: str) -> Any:
    """Return the module ``pretrain_<model>``."""
    from megatron.models.registry import FAMILIES

    return importlib.import_module(FAMILIES[model].program.removesuffix(".py").replace("/", "."))


def run(out_dir: Path, layout: Layout, flags: list[str], model: str, steps: int, num_replicas: int) -> list[Any]:
    """Train in ``layout`` through the launcher; return each rank's trace.

    Args:
        num_replicas: number of replicas in the compared layout if this run is the single process, which runs the
            micro-batches of all of them; otherwise 1.
    """
    out_dir.mkdir()
    command = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", str(layout.world_size)]
    device = flags[flags.index("--device") + 1]
    if device == "cpu":  # forking is not safe after a process has initialized a device
        command += ["--preload", "torch,deepspeed,torch._inductor.codecache"]
    command += [__file__, "--worker", str(out_dir), model, str(steps), str(num_replicas), *flags]
    command += layout.flags
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = os.environ | {"PYTHONPATH": path, "DS_ACCELERATOR": device, "OMP_NUM_THREADS": "1"}
    if device not in ("cpu", "cuda"):  # DeepSpeed finds the device by its plug-in
        del env["DS_ACCELERATOR"]
    process = subprocess.run(command, env=env, check=False)
    if process.returncode:
        raise SystemExit(process.returncode)
    return [read_trace(out_dir / f"rank-{rank}") for rank in range(layout.world_size)]


def read_trace(path: Path) -> Any:
    """Load the trace that a rank saved."""
    import torch

    from megatron.mpu.shard import Shard
    from megatron.training.parity import Trace

    with torch.serialization.safe_globals([Trace, Shard]):
        return torch.load(path, weights_only=True)


def worker(out_dir: Path, model: str, steps: int, num_replicas: int, flags: list[str]) -> None:
    """Train on one rank and save its trace."""
    import torch

    from megatron.runtime.exit_guard import guard
    from megatron.training import configure_device, initialize

    config = parse_config(model, add_data_flags(flags, model), int(os.environ["WORLD_SIZE"]))
    configure_device(config)
    gas = config.batch.gas * (1 if config.batch.requested_global_batch_size else num_replicas)
    config = replace(config, batch=replace(config.batch, gas=gas))

    def train() -> None:
        from megatron.training.parity import trace_steps

        world, program = initialize.start(config), load_program(model)
        settings, tokenizer, dataset = load_dataset(config, program)
        providers = (program.model_provider, program.forward_step)
        trace = trace_steps(settings, world, dataset, *providers, num_steps=steps, tokenizer=tokenizer)
        torch.save(trace, out_dir / f"rank-{world.rank}")
        initialize.stop()

    guard(train, lambda: f"rank {os.environ.get('RANK', '0')}")


def add_data_flags(flags: list[str], model: str) -> list[str]:
    """Add flags that disable evaluation and, if no flag names data, select random tokens (``--data-path none``)."""
    from megatron.arguments import config_file
    from megatron.arguments.flag_values import scan
    from megatron.config.data import PATHS

    scanned = scan(flags, (), model)
    config_file.merge_config_file(scanned)
    flags = [*flags, "--eval-iters", "0"]
    return flags if scanned.values.keys() & {*PATHS, "sft"} else [*flags, "--data-path", "none"]


def load_dataset(config: Any, program: Any) -> tuple[Any, Any, Any]:
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


def report(reference: Any, traces: list[Any], dtype: str, path: Path | None = None) -> int:
    """Print the observed and allowed values and write them to ``path``; return 0 if all are within their bounds."""
    from rich.table import Table

    from megatron.console import print_table
    from megatron.training.parity import compare

    differences = compare(reference, traces)
    first_loss_bound, loss_bound, norm_bound, gradient_bound = BOUNDS[dtype]
    rows = [
        ("loss of the first step, absolute", differences.first_loss, first_loss_bound),
        ("loss of any step, absolute", differences.loss, loss_bound),
        ("gradient norm of the first step, relative", differences.first_norm, norm_bound),
        (f"worst gradient ({differences.worst_gradient}), relative", differences.gradient, gradient_bound),
    ]
    table = Table("value", "observed", "allowed", "", title=f"{len(traces)} processes compared with one, {dtype}")
    for name, observed, allowed in rows:
        table.add_row(name, f"{observed:.2e}", f"{allowed:.0e}", "ok" if observed <= allowed else "TOO FAR")
    print_table(table)
    is_equal = all(observed <= allowed for _, observed, allowed in rows)
    if path is not None:
        names = ("first_loss", "loss", "first_norm", "gradient")
        values = {name: {"observed": row[1], "allowed": row[2]} for name, row in zip(names, rows, strict=True)}
        results = {
            "is_equal": is_equal,
            "dtype": dtype,
            "ranks": len(traces),
            "worst": differences.worst_gradient,
            "seen": values,
        }
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("verdict: equal" if is_equal else "verdict: NOT EQUAL. Please report the command line and this table.")
    return 0 if is_equal else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
    else:
        sys.exit(main())
