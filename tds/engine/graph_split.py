"""Split any backward by autograd's graph: compute input gradients first and weight gradients later.

A **branch** is a node of the graph, such as ``AddmmBackward``, with one edge that leads to a stage input and another
that leads only to weights. The first pass asks autograd only for the input gradients; torch's built-in nodes skip
gradients that are not requested. The gradient that arrives at each branch is saved. The second pass runs the branch
again and asks only for its weight gradients.

This costs memory: the full graph of a micro-batch, with all saved tensors, is retained until its weight gradients are
computed, whereas the split of linear layers saves two tensors per layer. Recomputed layers are recomputed twice. The
gradients of these weights are not deferred:

* weights that several branches share;
* weights in a branch that is an ``autograd.Function``, which would run twice in full;
* weights in a branch without a matrix, such as norm vectors;
* weights that are hidden by reentrant recompute.

Source: ``torch.distributed.pipelining`` for the idea (``stage_backward_input``, ``stage_backward_weight``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(frozen=True)
class Branch:
    """A branch of the graph: its node, its weights, and the gradients that arrived at the node."""

    node: Any
    weights: tuple[torch.Tensor, ...]
    output_grads: list[Any]

    def leaves(self) -> tuple[torch.Tensor, ...]:
        return self.weights

    def run(self) -> None:
        grads_in = [
            (GradientEdge(self.node, idx), grad) for idx, grad in enumerate(self.output_grads) if grad is not None
        ]
        if grads_in:
            torch.autograd.backward([edge for edge, _ in grads_in], [grad for _, grad in grads_in], inputs=self.weights)

    def save_output_grads(self, grads: tuple[Any, ...]) -> None:
        """Save the gradients that arrive at the node; registered as its prehook."""
        self.output_grads[:] = grads


class _Graph:
    """The part of autograd's graph that is reachable from ``roots``.

    Attributes:
        order: all nodes, each after its ``next_functions``.
        branches: the branches whose weight gradients can be deferred.
        num_hidden_elements: weight elements in the linear layers that are split without the graph.
    """

    def __init__(self, roots: Sequence[Any], inputs: Sequence[torch.Tensor], anchor: torch.Tensor) -> None:
        self.order = list(_topological_order(_node_of(root) for root in roots))
        input_nodes = {_node_of(get_gradient_edge(item)) for item in inputs}
        self._leads_to_input: dict[Any, bool] = {}
        self._weights_below: dict[Any, frozenset[torch.Tensor]] = {}  # the weights that each node leads to
        self.num_hidden_elements = 0
        self._anchor = _node_of(get_gradient_edge(anchor))
        for node in self.order:
            children = [item for item, _ in node.next_functions if item is not None]
            self._leads_to_input[node] = node in input_nodes or any(self._leads_to_input[item] for item in children)
            leaf_variables = [node.variable] if hasattr(node, "variable") else []
            self._weights_below[node] = frozenset(leaf_variables).union(
                *(self._weights_below[item] for item in children)
            )
            if self._anchor in children:
                self.num_hidden_elements += node.leaves[0].numel()
        self.branches = self._find_branches(anchor)

    def _find_branches(self, anchor: torch.Tensor) -> list[Branch]:
        branches: list[Branch] = []
        uses: Counter[torch.Tensor] = Counter()
        for node in self.order:
            if not self._leads_to_input[node]:
                continue
            weight_side = [
                child for child, _ in node.next_functions if child is not None and not self._leads_to_input[child]
            ]
            weights = frozenset[torch.Tensor]().union(*(self._weights_below[child] for child in weight_side)) - {anchor}
            uses.update(weights)
            is_custom_function = isinstance(node, torch.autograd.function.BackwardCFunction)
            if not is_custom_function and any(weight.dim() > 1 for weight in weights):
                branches.append(Branch(node, tuple(weights), []))
        return [branch for branch in branches if all(uses[weight] == 1 for weight in branch.weights)]


def defers_more(roots: Sequence[Any], inputs: Sequence[torch.Tensor], anchor: torch.Tensor) -> bool:
    """Return True if splitting by the graph defers more weight elements than splitting only the linear layers.

    Args:
        anchor: the leaf tensor that marks split linear layers. It is an input of each of their nodes, and each of these
            nodes has an attribute ``leaves`` (weight, bias).
    """
    graph = _Graph(roots, inputs, anchor)
    return sum(weight.numel() for branch in graph.branches for weight in branch.weights) > graph.num_hidden_elements


def backward(
    roots: Sequence[Any], grads: Sequence[Any], inputs: Sequence[torch.Tensor], anchor: torch.Tensor
) -> list[Branch]:
    """Run the backward from ``roots``, except for the weight gradients that can be deferred.

    Args:
        roots: a loss, or gradient edges with their ``grads``.
        inputs: leaves whose gradients are computed now.
        anchor: see ``defers_more``. Its gradient is requested as well, so that the split linear layers run.

    Returns:
        The branches whose weight gradients are deferred. ``Branch.run`` computes them.
    """
    graph = _Graph(roots, inputs, anchor)
    deferred = {weight for branch in graph.branches for weight in branch.weights}
    leaves = [node.variable for node in graph.order if hasattr(node, "variable") and node.variable not in deferred]
    hooks = [branch.node.register_prehook(branch.save_output_grads) for branch in graph.branches]
    try:
        torch.autograd.backward(roots, grads or None, retain_graph=bool(hooks), inputs=leaves)
    finally:
        for hook in hooks:
            hook.remove()
    return graph.branches


def _node_of(root: Any) -> Any:
    if isinstance(root, GradientEdge):
        return root.node
    return root.grad_fn if root.grad_fn is not None else get_gradient_edge(root).node


def _topological_order(roots: Iterator[Any]) -> Iterator[Any]:
    """Yield every node that is reachable from ``roots`` once, after its ``next_functions``."""
    seen: set[Any] = set()
    stack = [(node, False) for node in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
