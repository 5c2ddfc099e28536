"""Repeat the proof of a finished run on this machine, and report each item as equal or different.

    python tools/verify.py runs/my-run
    python tools/verify.py runs/my-run --no-layout-check

A run writes proof.json at its end: the result of its layout check, hashes of the order and the tokens of its training
samples, the ids of a text, versions and the commit. This tool computes the same again, with the settings in the run's
config.json. Call it in the folder in which the run was started, because paths of data are relative to it.

The exit code is 0 if all recorded items are equal, 1 if an item is different or could not be repeated, and 2 if the
folder has no proof.json.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import log
from megatron.errors import JobError, exit_code


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder with proof.json")
    parser.add_argument("--no-layout-check", action="store_true", help="do not repeat the layout check")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Print the comparison of each item; return the exit code."""
    args = parse_args(argv)
    os.environ["DS_ACCELERATOR"] = "cpu"  # before torch and DeepSpeed are imported

    from megatron.training.proof.repeat import DIFFERENT, NOT_REPEATED, repeat_proof

    states = []
    try:
        for item in repeat_proof(args.run, has_layout_check=not args.no_layout_check):
            states.append(item.state)
            print(f"{item.name}: {item.state} ({item.text})", flush=True)
    except JobError as error:
        log.error(f"{args.run}: {error}")
        return exit_code(error)
    is_equal = not {DIFFERENT, NOT_REPEATED} & set(states)
    print("verdict: equal" if is_equal else "verdict: NOT EQUAL")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
