"""What the launchers of one job tell each other about its end, over the store of node 0.

| key | written by | holds |
|---|---|---|
| ``failed`` | a node that lost a rank | that it happened |
| ``verdict/R`` | node R | its culprit, as JSON |
| ``left`` | every node | how many nodes have no rank left |
| ``gone`` | every node | how many nodes have read what they want to know |
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from torch.distributed import Store

from megatron.launch.verdict import Exit

POLL_S = 0.05


class Board:
    """One node's view of the table above; with one node there is nobody to tell."""

    def __init__(self, store: Store, node_rank: int, num_nodes: int) -> None:
        self._store, self._node_rank, self._num_nodes = store, node_rank, num_nodes

    def is_failed(self) -> bool:
        """Whether a node has lost a rank, or node 0 is gone."""
        return self._num_nodes > 1 and self._ask(lambda: self._store.check(["failed"]), True)

    def all_left(self) -> bool:
        """Whether no node has a rank left."""
        return self._num_nodes == 1 or self._ask(lambda: self._store.add("left", 0) >= self._num_nodes, True)

    def tell_left(self) -> None:
        """Say that this node has no rank left."""
        if self._num_nodes > 1:
            self._ask(lambda: self._store.add("left", 1), 0)

    def tell_failed(self, verdict: Exit | None) -> None:
        """Say which rank of this node ended the job, if one did."""
        if self._num_nodes > 1:
            if verdict is not None:
                self._ask(lambda: self._store.set(f"verdict/{self._node_rank}", json.dumps(asdict(verdict))), None)
            self._ask(lambda: self._store.set("failed", "1"), None)

    def verdicts(self) -> list[Exit]:
        """Return the culprits that the nodes have named so far."""
        found = []
        for node in range(self._num_nodes if self._num_nodes > 1 else 0):
            key = f"verdict/{node}"
            if self._ask(partial(self._store.check, [key]), False):
                found.append(Exit(**json.loads(self._store.get(key))))
        return found

    def leave(self, timeout_s: float) -> None:
        """Let node 0, whose store this is, be the last to go."""
        if self._num_nodes == 1:
            return
        self._ask(lambda: self._store.add("gone", 1), 0)
        end = time.monotonic() + timeout_s
        while self._node_rank == 0 and time.monotonic() < end:
            if self._ask(lambda: self._store.add("gone", 0) >= self._num_nodes, True):
                return
            time.sleep(POLL_S)

    @staticmethod
    def _ask(question: Callable[[], object], without_store: object) -> bool:
        try:
            return bool(question())
        except RuntimeError:  # node 0 is gone, and the store with it
            return bool(without_store)
