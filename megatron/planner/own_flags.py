"""The flags that are the planner's own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.config.one_line_parser import OneLineParser
from megatron.models.registry import FAMILIES
from megatron.planner.devices import SHEETS


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of the flags that are the planner's own."""
    parser = OneLineParser(
        prog="plan.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=tuple(FAMILIES), help="family of the model")
    parser.add_argument("--gpus", type=positive, metavar="N", help="devices in all (default: those of one node)")
    parser.add_argument("--gpu", metavar="NAME", help=f"kind of device: {', '.join(SHEETS)} (default h100-80g)")
    parser.add_argument("--machine", type=Path, metavar="FILE", help="device and links as --calibrate measured them")
    parser.add_argument("--gpus-per-node", type=positive, metavar="N", help="devices of a node (default 8, or as FILE)")
    parser.add_argument("--memory", type=number, metavar="GB", help="memory of a device (default: the device's own)")
    parser.add_argument(
        "--global-batch-size", type=positive, metavar="B", help="samples of a step (default: about 4 Mi tokens)"
    )
    parser.add_argument("--tokens", type=number, metavar="N", help="also tell the days for so many tokens, as 300e9")
    parser.add_argument("--fits", action="store_true", help="look at the one layout that is given, and how to fit it")
    parser.add_argument("--top", type=positive, metavar="N", help="layouts in the ranking (default 10)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="measure this machine, about 30 s, and write it")
    parser.add_argument("--ranks", type=positive, metavar="N", help="with --calibrate: processes that work at once")
    parser.add_argument("--device", metavar="KIND", help="with --calibrate: cpu or cuda (default: what is there)")
    return parser


def check_flags(parser: argparse.ArgumentParser, flags: argparse.Namespace, rest: Sequence[str]) -> None:
    """End with code 2 unless the flags go together."""
    if flags.calibrate is not None:
        others = [name for name, value in vars(flags).items() if value and name not in ("calibrate", "ranks", "device")]
        if others or rest:
            got = " ".join([*(f"--{name.replace('_', '-')}" for name in others), *rest])
            parser.error(f"--calibrate FILE measures and does nothing else, got {got} too. Plan with --machine FILE")
        return
    for name in ("ranks", "device"):
        if getattr(flags, name):
            parser.error(f"--{name} acts with --calibrate only. Leave it out")
    if flags.model is None:
        parser.error(f"--model must be given, one of {', '.join(FAMILIES)}")
    if flags.gpu and flags.machine:
        parser.error("--gpu names a known device and --machine a file: give one of them")
    if flags.fits and flags.top:
        parser.error("--top counts what is ranked, and --fits looks at one layout: give one of them")


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def number(text: str) -> float:
    """Return a number above 0, such as 300e9."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, such as 300e9, got {text!r}")
    return value
