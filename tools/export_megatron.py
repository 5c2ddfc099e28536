"""Export a checkpoint to Megatron-LM's distributed format (torch_dist), so that a run continues there.

    python tools/export_megatron.py --load runs/my-run --output my-megatron
    python tools/export_megatron.py --load runs/my-run --output my-megatron --use-distributed-optimizer

The output has weights, main params, the moments of Adam, the numbers of steps and samples, the state of the
learning-rate schedule, and the arguments of Megatron-LM for the same model. Megatron-LM loads it in any layout:
--load my-megatron --use-checkpoint-args --override-opt_param-scheduler. One tensor is in memory at a time.
Supported are decoders that Megatron-Core's GPT can represent: GPT-2 and LLaMA with their settings, also with experts.
The other direction needs no tool: --load reads a folder of Megatron-LM.
Exit codes: 0, 2 (an invalid option), 3 (a checkpoint that cannot be exported).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import log
from megatron.errors import exit_code


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--load", type=Path, required=True, help="run folder (its newest checkpoint), or one checkpoint")
    add("--output", type=Path, required=True, help="folder of --load in Megatron-LM; iter_N is added to it")
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="type of the weights (default: that of the run)")
    add(
        "--use-distributed-optimizer",
        action="store_true",
        help="store the optimizer's state for Megatron-LM's flag of this name (default: for a run without it)",
    )
    add(
        "--expert-parallel",
        action="store_true",
        help="for a run with --expert-model-parallel-size above 1, which has a separate optimizer for experts",
    )
    add(
        "--torch-adam",
        action="store_true",
        help="for a run without Apex and Transformer Engine, whose Adam is torch's",
    )
    return parser.parse_args(argv)


def export(args: argparse.Namespace) -> None:
    """Write the checkpoint and log its path."""
    from megatron.checkpoint.one_process import open_folder
    from megatron.checkpoint.torch_dist.export import ExportOptions, export_torch_dist

    options = ExportOptions(args.use_distributed_optimizer, args.torch_adam, args.expert_parallel, args.dtype)
    checkpoint = open_folder(args.load)
    folder, notes = export_torch_dist(checkpoint, args.output, options)
    for note in notes:
        log.info(note)
    log.info(f"{checkpoint.path} -> {folder}")


def main() -> int:
    """Run the tool and return the exit code."""
    args = parse_args()
    try:
        export(args)
    except Exception as error:
        log.error(f"error: {error}")
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
