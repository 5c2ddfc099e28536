"""Parameters, products, kept activations, scratch and messages of a feed-forward half with experts. No torch.

All but parameters at an even load: each expert gets as many tokens. A rank whose experts get more keeps, computes and
sends more by as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.costs.cost import Product

# For E experts of f, k of a token, a shared one of f'; n tokens of a micro-batch on a rank, e expert ranks, t tensor
# ranks; m is 2, gated 3. With --expert-tensor-parallel-size 1 experts are whole and see n / t tokens.
#
# | count | formula |
# |---|---|
# | parameters in total | m h (E f + f') + E h for the router |
# | active parameters, those that a token goes through | m h (k f + f') + E h |
# | parameters on a rank | m h (E f / e + f') / t + E h |
# | rows of its experts | n k |
# | kept, numbers | rows that came and what went back 2 n k h; between the products those of a width of k f + f' |
# | kept, bytes | order and place of rows 16 n k, with e > 1 twice; choices 8 n k; tables of the router, 4 n E |
# | ... in 16 bits | the router's input and weight in fp32 |
# | a backward works in | two gradients of what went back, or those of one product's weights of all experts |
# | all-to-all | n k h numbers to the experts and as many back; their gradients the same |
#
# The counts of rows (8 E bytes of a rank and layer) that ranks tell each other are left out.

INDEX = 8
"""Bytes of a place in a list of rows."""


@dataclass(frozen=True)
class ExpertCosts:
    """What the experts, router and shared expert of one layer cost.

    Args:
        sizes: those of the model.
        matrices: of an expert, gate and value apart.
        of_width: numbers that a feed-forward layer keeps for a token between its products, for each of its width.
        ranks: that share out the experts; ``cuts_experts``: over the tensor ranks, too.
    """

    sizes: Any
    matrices: int
    of_width: int
    ranks: int = 1
    cuts_experts: bool = True

    @property
    def active_width(self) -> int:
        """Width of all that a token goes through, the shared expert's too."""
        sizes = self.sizes
        return int(sizes.moe_router_topk * sizes.moe_ffn_hidden_size + sizes.moe_shared_expert_intermediate_size)

    @property
    def flops(self) -> int:
        """FLOPs of a token, forward."""
        return 2 * self.sizes.hidden_size * (self.matrices * self.active_width + int(self.sizes.num_experts))

    def parameters(self, tensor: int = 1, *, is_active: bool = False) -> int:
        """Return the parameters of the half on one of ``tensor`` ranks; the router is whole.

        Args:
            is_active: only those that a token goes through.
        """
        sizes, h = self.sizes, self.sizes.hidden_size
        own = self._expert_parameters(tensor, sizes.moe_router_topk if is_active else sizes.num_experts // self.ranks)
        shared = self.matrices * h * sizes.moe_shared_expert_intermediate_size // tensor
        router = sizes.num_experts * (h + sizes.moe_router_enable_expert_bias) + h * sizes.moe_shared_expert_gate
        return int(own + shared + router)

    def apart(self, tensor: int = 1) -> int:
        """Return those of them that not all data x context ranks have replicas of."""
        return self._expert_parameters(tensor, self.sizes.num_experts // self.ranks) if self.ranks > 1 else 0

    def _expert_parameters(self, tensor: int, number: int) -> int:
        """Return the parameters of so many experts on a tensor rank."""
        width = number * int(self.sizes.moe_ffn_hidden_size)
        return self.matrices * int(self.sizes.hidden_size) * width // self._cut(tensor)

    def _cut(self, tensor: int) -> int:
        """Return over how many ranks each expert is cut."""
        return tensor if self.cuts_experts else 1

    def _seen(self, tokens: int, tensor: int) -> int:
        """Return of how many tokens a rank sends rows."""
        return tokens if self.cuts_experts else tokens // tensor

    @property
    def num_sums(self) -> int:
        """Sums of hidden states over the tensor ranks, in a forward: of the experts, of the shared one."""
        return self.cuts_experts + bool(self.sizes.moe_shared_expert_intermediate_size)

    def products(self, tokens: int, tensor: int) -> tuple[Product, ...]:
        """Return the products of the router, of each expert with its share of the rows of all ranks, of the shared one.

        A gated expert makes gate and value in one.
        """
        sizes, h, cut = self.sizes, self.sizes.hidden_size, self._cut(tensor)
        rows = -(-self._seen(tokens, tensor) * sizes.moe_router_topk * self.ranks // sizes.num_experts)
        width, shared = sizes.moe_ffn_hidden_size // cut, sizes.moe_shared_expert_intermediate_size // tensor
        own, entering = sizes.num_experts // self.ranks, self.matrices - 1
        found = [Product(tokens, h, sizes.num_experts)]
        found += [Product(rows, h, entering * width, own), Product(rows, width, h, own)]
        if shared:
            found += [Product(tokens, h, entering * shared, is_column=True), Product(tokens, shared, h)]
        return tuple(found)

    def kept(self, tokens: int, tensor: int, width: int, sequence: int = 1, *, is_joined: bool = False) -> int:
        """Return the bytes that the half keeps until its backward, above the input that a dense half keeps.

        Args:
            tokens: of a micro-batch.
            width: bytes of a number.
            sequence, is_joined: as of ``Costs.unit_kept``.
        """
        sizes, h, wide = self.sizes, self.sizes.hidden_size, max(width, 4)
        number, k, part = sizes.num_experts, sizes.moe_router_topk, tokens // sequence
        rows = self._seen(tokens, tensor) * k
        between = tokens * self.of_width * self.active_width * width // tensor
        lists = rows * (2 * INDEX * (2 if self.ranks > 1 else 1) + 2 * wide) + part * INDEX * k
        tables = self._tables * part * number * wide
        gated = part * h * width if sizes.moe_shared_expert_gate else 0
        return 2 * rows * h * width + between + lists + tables + gated + self._input(part, tokens, width, is_joined)

    @property
    def _tables(self) -> int:
        """Tables [tokens, E] that the router keeps: what weights are looked up in, and those of the losses."""
        sizes = self.sizes
        is_sigmoid = sizes.moe_router_score_function == "sigmoid"
        has_logits = not is_sigmoid and not sizes.moe_router_pre_softmax  # they are that table
        softmax = bool(sizes.has_aux_loss) and not is_sigmoid
        return 1 + softmax + (bool(sizes.moe_z_loss_coeff) and not has_logits)

    def _input(self, part: int, tokens: int, width: int, is_joined: bool) -> int:
        """Return what the router keeps, and the experts, which keep rows, do not: input and weight, in 16 bits copies.

        Args:
            part: tokens that the router sees.
        """
        h, shared = self.sizes.hidden_size, self.sizes.moe_shared_expert_intermediate_size
        dense = (tokens if is_joined else part) * h * width  # what a dense half, or the shared expert, keeps
        router = part * h * max(width, 4) + (4 * h * int(self.sizes.num_experts) if width < 4 else 0)
        if not shared:
            return int(router - dense)
        return 0 if width >= 4 and dense == router else int(router)

    def work(self, tokens: int, tensor: int, width: int, sequence: int = 1) -> int:
        """Return the bytes that a backward of the half works in, above what it has let go.

        The gradients of all weights of a product are there at once, ahead of being added to their sums.
        """
        sizes, h, k = self.sizes, self.sizes.hidden_size, self.sizes.moe_router_topk
        rows, f = self._seen(tokens, tensor) * k, sizes.moe_ffn_hidden_size // self._cut(tensor)
        weights, entering = h * f * (sizes.num_experts // self.ranks), self.matrices - 1
        there = tokens // sequence * h  # the gradient of the residual stream
        if shared := sizes.moe_shared_expert_intermediate_size:  # it goes first
            there += tokens * h - tokens * self.of_width * shared // tensor
        most = max(
            2 * rows * h,
            rows * f + weights,
            entering * weights + rows * f * (entering - self.of_width),
        )
        return max(there + most, 0) * width

    def messages(self, tokens: int, tensor: int, width: int) -> tuple[int, int]:
        """Return the bytes of the rows that a rank gives to an all-to-all to the experts, and back; its own are among.

        Of gradients as many.
        """
        if self.ranks == 1:
            return 0, 0
        one = self._seen(tokens, tensor) * self.sizes.moe_router_topk * self.sizes.hidden_size * width
        return one, one


def exchanged_bytes(counts: Sequence[Sequence[int]], rank: int, hidden_size: int, width: int) -> int:
    """Return the bytes of rows that ``rank`` sends to others for one layer and micro-batch, forward and backward.

    Args:
        counts: rows that each expert rank has for each expert, [ranks, E].
        width: bytes of a number.
    """
    each = len(counts[0]) // len(counts)
    gives = sum(counts[rank]) - sum(counts[rank][rank * each : (rank + 1) * each])
    takes = sum(sum(own[rank * each : (rank + 1) * each]) for place, own in enumerate(counts) if place != rank)
    return 2 * (gives + takes) * hidden_size * width
