"""What the launchers of one job tell each other about the end of one start, over the store of node 0.

| key | written by | holds |
|---|---|---|
| ``failed`` | a node that lost a rank | that it happened |
| ``verdict/R`` | node R | its culprit, as JSON |
| ``left`` | every node | how many nodes have no rank left |
| ``vote/R`` | node R, once all have left | why it would not start again; empty if it would |
| ``decision`` | node 0, once all have voted | "go" or "stop", a space, and the reason |
| ``gone`` | every node | how many nodes have read what they want to know |

Each start has a board of its own: the agent hands over a store with the start's number in its keys.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from torch.distributed import Store

from megatron.launch.signals import Signals
from megatron.launch.verdict import Exit

POLL_S = 0.05
T = TypeVar("T")


class Board:
    """One node's view of the table above; with one node there is nobody to tell.

    Waiting ends at the latest with a second signal.
    """

    def __init__(self, store: Store, node_rank: int, num_nodes: int, signals: Signals) -> None:
        self._store, self._node_rank, self._num_nodes, self._signals = store, node_rank, num_nodes, signals

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

    def agree(self, against: str, timeout_s: float, go: Callable[[], str]) -> tuple[bool, str]:
        """Return whether the job starts again and the reason, the same on every node.

        Sound because node 0 says "go" only when every node has said that it has no rank left and would start again; a
        node that is lost, or asked to stop, says nothing or no.

        Args:
            against: why this node would not start again; empty if it would.
            go: called on node 0 when all would: where the next start begins, in words.
        """
        if self._num_nodes == 1:
            return (False, against) if against else (True, go())
        self._ask(lambda: self._store.set(f"vote/{self._node_rank}", against), None)
        if self._node_rank == 0:
            against = self._count_votes(timeout_s)
            told = f"stop {against}" if against else f"go {go()}"
            self._ask(lambda: self._store.set("decision", told), None)
        else:
            self._wait(lambda: self._ask(lambda: self._store.check(["decision"]), True), 2 * timeout_s)
            told = self._ask(lambda: self._read("decision"), "") or "stop node 0 was lost"
        word, _, reason = told.partition(" ")
        return word == "go", reason

    def leave(self, timeout_s: float) -> None:
        """Let node 0, whose store this is, be the last to go."""
        if self._num_nodes == 1:
            return
        self._ask(lambda: self._store.add("gone", 1), 0)
        if self._node_rank == 0:
            self._wait(lambda: self._ask(lambda: self._store.add("gone", 0) >= self._num_nodes, True), timeout_s)

    def _count_votes(self, timeout_s: float) -> str:
        """Return why the job does not start again, or "" if all nodes would."""
        keys = [f"vote/{node}" for node in range(self._num_nodes)]
        self._wait(lambda: self._ask(lambda: self._store.check(keys), True), timeout_s)
        missing = [
            str(node) for node, key in enumerate(keys) if not self._ask(partial(self._store.check, [key]), False)
        ]
        if missing:
            return f"node {', '.join(missing)} did not answer"
        return next((vote for vote in map(self._read, keys) if vote), "")

    def _read(self, key: str) -> str:
        """Return what a key holds, or "" if nobody wrote it."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not is_done() and time.monotonic() < end and not self._signals.is_ended:
            self._signals.wait(POLL_S)

    @staticmethod
    def _ask(question: Callable[[], T], without_store: T) -> T:
        try:
            return question()
        except RuntimeError:  # node 0 is gone, and the store with it
            return without_store
