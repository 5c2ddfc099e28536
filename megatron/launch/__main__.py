"""Entry point of ``python -m megatron.launch [flags] script.py [its flags]``; see the package's docstring."""

from __future__ import annotations

import errno
import gc
import importlib
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron import log
from megatron.errors import ConfigError, PeerError
from megatron.launch import machine
from megatron.launch.options import Options, parse

if TYPE_CHECKING:
    from megatron.launch.elastic import ElasticRendezvous
    from megatron.launch.processes import Signals
    from megatron.launch.rendezvous import LaunchRendezvous

PORT_WAIT_S = 2.0


def main(argv: Sequence[str]) -> int:
    """Run the job and return its exit code."""
    try:
        return _launch(parse(argv))
    except (ConfigError, PeerError) as error:
        log.error(f"error: {error}")
        return 2 if isinstance(error, ConfigError) else 4
    except KeyboardInterrupt:
        return 130


def _launch(options: Options) -> int:
    """Set up rendezvous and agent, run the job, and return its exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", str(machine.threads_per_rank(options.nproc_per_node)))
    if warning := machine.crowding_warning(options.nproc_per_node):
        log.warning(warning)
    from megatron.launch.processes import Signals

    signals = Signals()
    # Imported here because torch reads OMP_NUM_THREADS when imported, and so that wrong flags are reported at once.
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from megatron.launch.agent import PROGRESS, LaunchAgent
    from megatron.launch.elastic import JobEnded
    from megatron.launch.rendezvous import NodeRendezvous
    from megatron.runtime.rendezvous import raise_open_files_limit

    listener = _open_port(options) if options.is_elastic or options.node_rank == 0 else None
    if listener is not None:
        raise_open_files_limit(options.nproc_per_node * options.nnodes)
    gc.disable()  # imported objects are never freed
    for name in options.preload:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()  # otherwise a collection in a forked rank would visit all objects and copy their pages
    # A TemporaryDirectory would be deleted when a fork exits.
    folder = Path(tempfile.mkdtemp(prefix="megatron-launch-"))
    rendezvous: LaunchRendezvous
    if options.is_elastic:
        assert listener is not None
        rendezvous = _make_elastic_rendezvous(options, listener, folder / PROGRESS, signals)
    else:
        rendezvous = NodeRendezvous(
            host=options.master_addr,
            port=listener.getsockname()[1] if listener else options.master_port,
            node_rank=options.node_rank,
            num_nodes=options.nnodes,
            listener=listener,
            timeout_s=options.init_timeout_s,
        )
    spec = WorkerSpec(
        role="rank",
        local_world_size=options.nproc_per_node,
        rdzv_handler=rendezvous,
        entrypoint=options.script,
        max_restarts=options.max_restarts,
        monitor_interval=0.001,
    )
    try:
        agent = LaunchAgent(spec, options, rendezvous, signals, folder)
        agent.run()
        return agent.job_code
    except JobEnded as job_end:
        log.error(f"launch: {job_end}, code {job_end.code}")
        return job_end.code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_elastic_rendezvous(
    options: Options, listener: socket.socket, progress: Path, signals: Signals
) -> ElasticRendezvous:
    from megatron.launch.control import Control
    from megatron.launch.elastic import ElasticRendezvous
    from megatron.runtime import progress_file

    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # ranks follow from the order of the nodes
    shared_settings = {
        "nnodes": [options.min_nodes, options.nnodes],
        "nproc": options.nproc_per_node,
        "hosts": [f"{host}:{port}" for host, port in options.node_list],
    }
    silence_s = options.node_timeout_s
    control = Control(options.node_list, options.node_rank, listener, shared_settings, silence_s, progress)
    return ElasticRendezvous(
        control,
        min_nodes=options.min_nodes,
        max_nodes=options.nnodes,
        nproc=options.nproc_per_node,
        timeout_s=options.init_timeout_s,
        silence_s=silence_s,
        signals=signals,
        durable_step=partial(progress_file.read_committed_step, progress),
    )


def _open_port(options: Options) -> socket.socket:
    """Open this node's listening socket: at its --node-list entry in an elastic job, otherwise for node 0's store."""
    from megatron.launch.rendezvous import listen

    if options.is_elastic:
        return _open_node_list_port(options)
    try:
        listener = listen(options.master_addr, options.master_port, options.nnodes)
    except OSError as error:
        raise ConfigError(
            f"MASTER_PORT must be free on node 0, got {options.master_addr}:{options.master_port}: {error.strerror}. "
            "Choose another port, the same on every node."
        ) from error
    if listener.getsockname()[1] != options.master_port:
        log.warning(f"port {options.master_port} is in use; using {listener.getsockname()[1]}")
    return listener


def _open_node_list_port(options: Options) -> socket.socket:
    """Open the port of this node's --node-list entry, retrying while a killed launcher may still hold it."""
    from megatron.launch.rendezvous import listen

    host, port = options.node_list[options.node_rank]
    deadline = time.monotonic() + PORT_WAIT_S
    while True:
        try:
            return listen(host, port, options.nnodes)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(PORT_WAIT_S / 40)
                continue
            raise ConfigError(
                f"the port of this node's entry in --node-list must be free, got {host}:{port}: {error.strerror}. "
                "Check that no other launcher has this NODE_RANK, or choose another port on all nodes."
            ) from error


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips the orderly shutdown of torch, which takes up to a second
