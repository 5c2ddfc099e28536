"""A Ray cluster of two nodes on this machine, with one CPU each, for a test that controls it line by line.

    python ray_cluster.py

prints its address. It accepts these lines and answers each with one line:

    stop    suspend the processes of the second node with all their children; prints their ids
    go      continue them
    kill    kill them with SIGKILL, after which Ray forgets the node

``end`` ends both nodes. Ray's own ``remove_node`` kills only the node's process, so its workers finish their units.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

from ray.cluster_utils import Cluster


def find_process_ids(node: Any) -> list[int]:
    """Return the ids of the processes of a ``Cluster`` node and of all their descendants."""
    pids = [info.process.pid for infos in node.all_processes.values() for info in infos]
    for pid in pids:  # grows during the iteration
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
        pids += [int(child) for child in children.stdout.split()]
    return pids


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second_node = cluster.add_node(num_cpus=1)
    print(cluster.address, flush=True)
    signals = {"stop": signal.SIGSTOP, "go": signal.SIGCONT, "kill": signal.SIGKILL}
    for line in sys.stdin:
        if line.strip() not in signals:
            break
        pids = find_process_ids(second_node)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signals[line.strip()])
        if line.strip() == "kill":
            cluster.remove_node(second_node, allow_graceful=False)
        print(*pids, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
