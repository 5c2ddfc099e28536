"""Average the weights of checkpoints into a new checkpoint: the end of a WSD run, or a soup of several runs.

    python tools/average.py runs/my-run --last 4 --output runs/mean
    python tools/average.py runs/my-run --steps 800 900 1000 --output runs/mean
    python tools/average.py runs/my-run --last 8 --ema 0.9 --output runs/ema
    python tools/average.py runs/one runs/another --output runs/soup        # the newest checkpoint of each run

The checkpoints may have any layouts, and the result can be loaded in any layout: --load FOLDER --finetune,
tools/generate.py, tools/convert_hf.py export. Sums are computed in fp64 and rounded once to the saved type of the
weights. With --ema D the mean starts as the first checkpoint and is updated in order: mean = D mean + (1 - D) next.
Only weights are written; a run with --load-weights-only continues at the step of the last checkpoint.
Exit codes: 0, 2 (an invalid option), 3 (checkpoints that cannot be averaged).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import log
from megatron.errors import ConfigError, exit_code


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("sources", type=Path, nargs="+", metavar="RUN", help="run folders, or checkpoint folders")
    add("--last", type=int, metavar="K", help="average the last K checkpoints of a single run")
    add("--steps", type=int, nargs="+", metavar="STEP", help="average the checkpoints of these steps of a single run")
    add("--ema", type=float, metavar="D", help="exponential moving average with this decay (default: the mean)")
    add("--output", type=Path, required=True, help="run folder to write; must be new or empty")
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    """Check that the options fit together.

    Raises:
        ConfigError: fewer than two checkpoints are selected, or the decay is invalid.
    """
    selection_flags = [flag for flag, value in (("--last", args.last), ("--steps", args.steps)) if value is not None]
    if len(args.sources) == 1 and len(selection_flags) != 1:
        raise ConfigError(
            f"a single run requires either --last K or --steps A B C, got {' and '.join(selection_flags) or 'neither'}"
        )
    if len(args.sources) > 1 and selection_flags:
        raise ConfigError(
            f"{selection_flags[0]} selects checkpoints of a single run, got {len(args.sources)}. List the checkpoints "
            "instead"
        )
    if args.last is not None and args.last < 2:
        raise ConfigError(f"--last must be at least 2, got {args.last}")
    if args.steps is not None and len(set(args.steps)) < 2:
        raise ConfigError(f"--steps must name at least 2 steps, got {' '.join(map(str, args.steps))}")
    if args.ema is not None and not 0 < args.ema < 1:
        raise ConfigError(f"--ema must be above 0 and below 1, got {args.ema}")


def run(args: argparse.Namespace) -> None:
    """Write the run folder and log its contents."""
    from megatron.checkpoint.average import average, open_newest, open_steps
    from megatron.checkpoint.one_process import open_folder

    check_args(args)
    if args.last is not None:
        checkpoints = open_newest(args.sources[0], args.last)
    elif args.steps is not None:
        checkpoints = open_steps(args.sources[0], args.steps)
    else:
        checkpoints = [open_folder(source) for source in args.sources]
    path = average(checkpoints, args.output, ema=args.ema)
    method = "mean" if args.ema is None else f"moving average (decay {args.ema:g})"
    log.info(
        f"{path}: the {method} of {len(checkpoints)} checkpoints: {', '.join(str(item.path) for item in checkpoints)}"
    )


def main() -> int:
    """Run the tool and return the exit code."""
    args = parse_args()
    try:
        run(args)
    except Exception as error:
        log.error(f"error: {error}")
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
