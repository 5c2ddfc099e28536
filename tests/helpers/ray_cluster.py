"""A Ray cluster of two nodes on this machine, with one CPU each, for a test that talks to it line by line.

    python ray_cluster.py

prints its address; on the line ``kill`` it kills the second node with all its processes, on ``end`` all.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(second, allow_graceful=False)
            print("killed", flush=True)
        else:
            break
    cluster.shutdown()


if __name__ == "__main__":
    main()
