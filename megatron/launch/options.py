"""The launcher's flags."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import ConfigError
from megatron.launch import machine

DEFAULT_PORT = 29500
MIN_NODE_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the launcher: the script, the nodes and ranks, and the timeouts."""

    nproc_per_node: int
    nnodes: int
    min_nodes: int
    node_list: tuple[tuple[str, int], ...]
    node_timeout_s: float
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

    @property
    def is_elastic(self) -> bool:
        """True if the number of nodes may change between ``min_nodes`` and ``nnodes``."""
        return bool(self.node_list)


def parse(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> Options:
    """Parse the options of ``python -m megatron.launch argv``.

    Raises:
        ConfigError: flags are invalid; the message lists all problems.
    """
    flags = _parser().parse_args(argv)
    gpus = machine.count_gpus(env)
    nproc = flags.nproc_per_node if flags.nproc_per_node is not None else max(1, gpus)
    min_nodes, nnodes = _parse_nodes(flags.nnodes)
    hosts = tuple(_parse_node_list(flags.node_list or env.get("NODE_LIST", ""), flags.master_port))
    problems = [*_problems(flags, nproc, gpus, nnodes), *_elastic_problems(flags, min_nodes, nnodes, hosts)]
    if problems:
        raise ConfigError("\n".join(problems))
    return Options(
        nproc_per_node=nproc,
        nnodes=nnodes,
        min_nodes=min_nodes,
        node_list=hosts if ":" in flags.nnodes else (),
        node_timeout_s=flags.node_timeout,
        node_rank=flags.node_rank,
        master_addr=flags.master_addr,
        master_port=flags.master_port,
        preload=tuple(name for name in flags.preload.split(",") if name),
        init_timeout_s=flags.init_timeout,
        stop_grace_s=flags.stop_grace,
        exit_grace_s=flags.exit_grace,
        max_restarts=flags.max_restarts,
        stdin=flags.stdin,
        script=flags.script,
        script_args=tuple(flags.script_args),
    )


def _parse_nodes(text: str) -> tuple[int, int]:
    """Parse "MIN:MAX" to (MIN, MAX), or "N" to (N, N).

    Raises:
        ConfigError: ``text`` has neither form.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise ConfigError(f"--nnodes must be a number, or MIN:MAX as in 6:8, got {text!r}.")
    return int(match.group(1)), int(match.group(2) or match.group(1))


def _parse_node_list(text: str, port: int) -> Iterator[tuple[str, int]]:
    """Parse "HOST[:PORT],..." to (host, port) pairs; the port is 0 if it is not a number."""
    for entry in filter(None, text.split(",")):
        host, separator, port_text = (
            entry.strip().rpartition(":") if re.search(r"[^:]:[^:]*$", entry) else (entry, "", "")
        )
        yield host.strip("[] "), (int(port_text) if port_text.isdecimal() else 0) if separator else port


def _elastic_problems(
    args: argparse.Namespace, min_nodes: int, nnodes: int, hosts: Sequence[tuple[str, int]]
) -> Iterator[str]:
    if ":" not in args.nnodes:
        return
    if not 1 <= min_nodes <= nnodes:
        yield f"--nnodes MIN:MAX needs 1 <= MIN <= MAX, got {args.nnodes}."
    elif len(hosts) != nnodes:
        yield (
            f"--nnodes {args.nnodes} needs --node-list (or NODE_LIST) with an entry HOST[:PORT] for each of the "
            f"{nnodes} nodes in the order of NODE_RANK, got {len(hosts)}. If the leader is lost, the next node takes "
            "over."
        )
    for host, port in dict.fromkeys(hosts):
        if not host or not 1 <= port <= 65535:
            yield f"an entry of --node-list must be HOST or HOST:PORT with a port of 1 to 65535, got {host}:{port}."
        elif hosts.count((host, port)) > 1:
            num_entries = hosts.count((host, port))
            yield f"each node needs its own entry in --node-list, got {host}:{port} {num_entries} times."
    if args.node_timeout < MIN_NODE_TIMEOUT_S:
        yield f"--node-timeout must be at least {MIN_NODE_TIMEOUT_S:g} seconds, got {args.node_timeout:g}."
    if not args.max_restarts:
        yield f"--nnodes {args.nnodes} needs --max-restarts N to restart after a lost node, got 0."


def _problems(args: argparse.Namespace, nproc: int, gpus: int, nnodes: int) -> list[str]:
    problems = []
    for flag, value, minimum in (
        ("--nproc-per-node", nproc, 1),
        ("--nnodes", nnodes, 1),
        ("--node-rank", args.node_rank, 0),
        ("--max-restarts", args.max_restarts, 0),
    ):
        if value < minimum:
            problems.append(f"{flag} must be at least {minimum}, got {value}.")
    if nnodes >= 1 and args.node_rank >= nnodes:
        problems.append(
            f"--node-rank must be below --nnodes, got --node-rank {args.node_rank} and --nnodes {nnodes}. "
            "Node ranks start at 0."
        )
    if not 1 <= args.master_port <= 65535:
        problems.append(f"--master-port must be 1 to 65535, got {args.master_port}.")
    if gpus and nproc > gpus:
        problems.append(
            f"--nproc-per-node must not exceed the GPUs of this node, got --nproc-per-node {nproc} and {gpus} GPU(s). "
            "Lower it (GPUS_PER_NODE in the run scripts), or train on the CPU with DS_ACCELERATOR=cpu."
        )
    if not Path(args.script).is_file():
        problems.append(f"the script to start must be an existing file, got {args.script!r}.")
    return problems


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron.launch",
        allow_abbrev=False,
        description="Start a training script once per device and end with the exit code of the rank that failed.",
        epilog="Exit codes: 0 success; 2 invalid input; 3 checkpoint error; 4 a rank died or timed out; 5 numerical "
        "error; 75 stopped on request and resumable; 1 any other exception; 130/143 ended by a second signal. "
        "After SIGTERM, Ctrl-C or SIGUSR1 (SLURM's warning), the ranks save and exit with 75.",
    )
    add = parser.add_argument
    add(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="number of ranks on this node (default: one per GPU, otherwise 1)",
    )
    add(
        "--nnodes", default="1", metavar="N",
        help="number of nodes (default 1); MIN:MAX: the job continues with at least MIN nodes when nodes are lost, and "
        "includes nodes that join after the next save; needs --max-restarts and --node-list",
    )  # fmt: skip
    add("--node-rank", type=int, default=0, metavar="R", help="rank of this node, from 0 (default 0)")
    add("--master-addr", default="127.0.0.1", metavar="HOST", help="host name of node 0 (default 127.0.0.1)")
    add(
        "--master-port", type=int, default=DEFAULT_PORT, metavar="PORT",
        help=f"port on node 0 (default {DEFAULT_PORT}); with one node, the next free port if it is in use",
    )  # fmt: skip
    add(
        "--node-list", default="", metavar="HOST[:PORT],...",
        help="with MIN:MAX: addresses of the MAX nodes in the order of --node-rank; the first node present is the "
        "leader (default NODE_LIST; default port --master-port)",
    )  # fmt: skip
    add(
        "--node-timeout", type=float, default=15.0, metavar="S",
        help="with MIN:MAX: seconds of silence after which a node is lost; a node whose launcher exits is lost "
        "immediately (default 15)",
    )  # fmt: skip
    add(
        "--preload", default="", metavar="MODULE,...",
        help="modules to import once before forking the ranks from the launcher, which saves seconds if there are more "
        "ranks than cores; without it every rank is a new Python process, as CUDA requires (default: none)",
    )  # fmt: skip
    add("--init-timeout", type=float, default=60.0, metavar="S", help="seconds to wait for all nodes (default 60)")
    add(
        "--stop-grace", type=float, default=600.0, metavar="S",
        help="seconds that ranks may take to save after SIGTERM or Ctrl-C (default 600)",
    )  # fmt: skip
    add(
        "--exit-grace", type=float, default=30.0, metavar="S",
        help="seconds between the first and the last successful exit of a rank (default 30)",
    )  # fmt: skip
    add(
        "--max-restarts", type=int, default=0, metavar="N",
        help="maximum number of restarts after code 1 or 4, from the last durable checkpoint; three consecutive starts "
        "without a new checkpoint end the job; the same on every node (default 0)",
    )  # fmt: skip
    add("--stdin", action="store_true", help="pass the launcher's standard input to rank 0, for interactive tools")
    add("script", help="the training script")
    add("script_args", nargs=argparse.REMAINDER, metavar="...", help="its flags")
    return parser
