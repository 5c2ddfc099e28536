"""A Ray cluster of two nodes on this machine, with one CPU each, for a test that talks to it line by line.

    python ray_cluster.py

prints its address. Lines that it takes, each answered by one line:

    stop    the second node's processes with all their children stand still; prints their numbers
    go      they go on
    kill    they end by SIGKILL, and Ray forgets the node

and ``end``: both nodes end. Ray's own ``remove_node`` kills the node's process alone: its workers finish their units.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

from ray.cluster_utils import Cluster


def processes_of(node: Any) -> list[int]:
    """Return the processes of a node of ``Cluster`` and all that they have started."""
    found = [info.process.pid for infos in node.all_processes.values() for info in infos]
    for number in found:  # grows while it is read
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(number)], capture_output=True, text=True)
        found += [int(child) for child in listed.stdout.split()]
    return found


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    print(cluster.address, flush=True)
    signals = {"stop": signal.SIGSTOP, "go": signal.SIGCONT, "kill": signal.SIGKILL}
    for line in sys.stdin:
        if line.strip() not in signals:
            break
        numbers = processes_of(second)
        for number in numbers:
            with suppress(ProcessLookupError):
                os.kill(number, signals[line.strip()])
        if line.strip() == "kill":
            cluster.remove_node(second, allow_graceful=False)
        print(*numbers, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
