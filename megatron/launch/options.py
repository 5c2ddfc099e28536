"""The launcher's flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import ConfigError
from megatron.launch import machine

DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to start, where, and how long to wait for what."""

    nproc_per_node: int
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    preload: tuple[str, ...]
    init_timeout_s: float
    stop_grace_s: float
    exit_grace_s: float
    max_restarts: int
    stdin: bool
    script: str
    script_args: tuple[str, ...]


def parse(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> Options:
    """Return the options of ``python -m megatron.launch argv``.

    Raises:
        ConfigError: with every problem found.
    """
    found = _parser().parse_args(argv)
    gpus = machine.count_gpus(env)
    nproc = found.nproc_per_node if found.nproc_per_node is not None else max(1, gpus)
    problems = _problems(found, nproc, gpus)
    if problems:
        raise ConfigError("\n".join(problems))
    return Options(
        nproc_per_node=nproc,
        nnodes=found.nnodes,
        node_rank=found.node_rank,
        master_addr=found.master_addr,
        master_port=found.master_port,
        preload=tuple(name for name in found.preload.split(",") if name),
        init_timeout_s=found.init_timeout,
        stop_grace_s=found.stop_grace,
        exit_grace_s=found.exit_grace,
        max_restarts=found.max_restarts,
        stdin=found.stdin,
        script=found.script,
        script_args=tuple(found.script_args),
    )


def _problems(found: argparse.Namespace, nproc: int, gpus: int) -> list[str]:
    problems = []
    for flag, value, least in (
        ("--nproc-per-node", nproc, 1),
        ("--nnodes", found.nnodes, 1),
        ("--node-rank", found.node_rank, 0),
        ("--max-restarts", found.max_restarts, 0),
    ):
        if value < least:
            problems.append(f"{flag} must be at least {least}, got {value}.")
    if found.nnodes >= 1 and found.node_rank >= found.nnodes:
        problems.append(
            f"--node-rank must be below --nnodes, got --node-rank {found.node_rank} and --nnodes {found.nnodes}. "
            "Nodes count from 0."
        )
    if not 1 <= found.master_port <= 65535:
        problems.append(f"--master-port must be 1 to 65535, got {found.master_port}.")
    if gpus and nproc > gpus:
        problems.append(
            f"--nproc-per-node must not exceed the GPUs of this node, got --nproc-per-node {nproc} and {gpus} GPU(s). "
            "Lower it (GPUS_PER_NODE in the run scripts), or train on the CPU with DS_ACCELERATOR=cpu."
        )
    if not Path(found.script).is_file():
        problems.append(f"the script to start must be a file, got {found.script!r}, which is none.")
    return problems


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron.launch",
        allow_abbrev=False,
        description="Start a training script once per device and end with the exit code of the rank that failed.",
        epilog="Exit codes: 0 done; 2 user input; 3 checkpoint; 4 a rank died or timed out; 5 numbers; "
        "75 stopped on request and resumable; 1 any other exception; 130/143 ended at once by a second signal. "
        "SIGTERM, Ctrl-C and SIGUSR1 (SLURM's warning) let the ranks save and leave with 75.",
    )
    add = parser.add_argument
    add("--nproc-per-node", type=int, metavar="N", help="ranks on this node (default: one per GPU, else 1)")
    add("--nnodes", type=int, default=1, metavar="N", help="nodes of the job (default 1)")
    add("--node-rank", type=int, default=0, metavar="R", help="number of this node, from 0 (default 0)")
    add("--master-addr", default="127.0.0.1", metavar="HOST", help="node 0 as the others reach it (default 127.0.0.1)")
    add(
        "--master-port", type=int, default=DEFAULT_PORT, metavar="PORT",
        help=f"port on node 0 (default {DEFAULT_PORT}); with one node the next free one is taken when it is in use",
    )  # fmt: skip
    add(
        "--preload", default="", metavar="MODULE,...",
        help="import these once and fork the ranks from the launcher, which saves seconds where ranks outnumber cores; "
        "without it every rank is a fresh Python, which CUDA needs (default: none)",
    )  # fmt: skip
    add("--init-timeout", type=float, default=60.0, metavar="S", help="seconds to wait for all nodes (default 60)")
    add(
        "--stop-grace", type=float, default=600.0, metavar="S",
        help="seconds that ranks may take to save after SIGTERM or Ctrl-C (default 600)",
    )  # fmt: skip
    add(
        "--exit-grace", type=float, default=30.0, metavar="S",
        help="seconds between the first rank that ends well and the last (default 30)",
    )  # fmt: skip
    add(
        "--max-restarts", type=int, default=0, metavar="N",
        help="starts after one that ended with code 1 or 4, from the last durable checkpoint; three in a row without a "
        "new one end the job; the same on every node (default 0)",
    )  # fmt: skip
    add("--stdin", action="store_true", help="let rank 0 read the launcher's standard input, for tools that ask")
    add("script", help="the training script")
    add("script_args", nargs=argparse.REMAINDER, metavar="...", help="its flags")
    return parser
