"""Costs of a feed-forward half with experts: parameters, products, saved activations, scratch memory and messages.

All costs except parameters assume an even load, where each expert gets the same number of tokens. A rank whose experts
get more tokens saves, computes and sends more in proportion. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.costs.cost import Product

# Symbols: E experts of width f, k per token, a shared expert of width f'; n tokens of a micro-batch on a rank, e expert
# ranks, t tensor ranks; m is 2, or 3 if gated. With --expert-tensor-parallel-size 1 experts are not sharded and process
# n / t tokens.
#
# | quantity | formula |
# |---|---|
# | parameters in total | m h (E f + f') + E h for the router |
# | active parameters, which a token uses | m h (k f + f') + E h |
# | parameters on a rank | m h (E f / e + f') / t + E h |
# | rows of its experts | n k |
# | saved elements | 2 n k h for received rows and returned results; activations of width k f + f' between products |
# | saved bytes | row permutation 16 n k, twice that if e > 1; expert indices 8 n k; 4 n E per router table |
# | ... in 16 bits | the router's input and weight in fp32 |
# | scratch of a backward | two gradients of the returned results, or the gradients of one weight of all experts |
# | all-to-all | n k h elements to the experts and as many back; the same for their gradients |
#
# The exchange of the numbers of rows (8 E bytes per rank and layer) is not counted.

INDEX_BYTES = 8
"""Bytes of an index in a list of rows."""


@dataclass(frozen=True)
class ExpertCosts:
    """Costs of the experts, router and shared expert of one layer.

    Args:
        model: sizes of the model.
        matrices: number of matrices of an expert, counting gate and value separately.
        saved_per_width: elements that a feed-forward layer saves per token and per unit of its width between its
            products.
        ranks: number of ranks over which experts are distributed.
        cuts_experts: each expert is also sharded over the tensor ranks.
    """

    model: Any
    matrices: int
    saved_per_width: int
    ranks: int = 1
    cuts_experts: bool = True

    @property
    def active_width(self) -> int:
        """Total width of the experts that a token uses, including the shared expert."""
        model = self.model
        return int(model.moe_router_topk * model.moe_ffn_hidden_size + model.moe_shared_expert_intermediate_size)

    @property
    def flops(self) -> int:
        """FLOPs per token in forward."""
        return 2 * self.model.hidden_size * (self.matrices * self.active_width + int(self.model.num_experts))

    def parameters(self, tensor: int = 1, *, is_active: bool = False) -> int:
        """Return the parameters of the half on one of ``tensor`` ranks; the router is not sharded.

        Args:
            is_active: count only the parameters that a token uses.
        """
        model, h = self.model, self.model.hidden_size
        experts = self._expert_parameters(
            tensor, model.moe_router_topk if is_active else model.num_experts // self.ranks
        )
        shared = self.matrices * h * model.moe_shared_expert_intermediate_size // tensor
        router = model.num_experts * (h + model.moe_router_enable_expert_bias) + h * model.moe_shared_expert_gate
        return int(experts + shared + router)

    def distributed_parameters(self, tensor: int = 1) -> int:
        """Return the parameters that are not replicated on all data x context ranks."""
        return self._expert_parameters(tensor, self.model.num_experts // self.ranks) if self.ranks > 1 else 0

    def _expert_parameters(self, tensor: int, num_experts: int) -> int:
        """Return the parameters of ``num_experts`` experts on a tensor rank."""
        width = num_experts * int(self.model.moe_ffn_hidden_size)
        return self.matrices * int(self.model.hidden_size) * width // self._num_expert_shards(tensor)

    def _num_expert_shards(self, tensor: int) -> int:
        """Return the number of ranks over which each expert is sharded."""
        return tensor if self.cuts_experts else 1

    def _num_routed_tokens(self, tokens: int, tensor: int) -> int:
        """Return the number of tokens whose rows a rank sends."""
        return tokens if self.cuts_experts else tokens // tensor

    @property
    def num_all_reduces(self) -> int:
        """Number of all-reduces over the tensor ranks in a forward: one for experts, one for the shared expert."""
        return self.cuts_experts + bool(self.model.moe_shared_expert_intermediate_size)

    def products(self, tokens: int, tensor: int) -> tuple[Product, ...]:
        """Return the products of the router, of each expert with its share of all ranks' rows, and the shared expert.

        A gated expert computes gate and value in one product.
        """
        model, h, num_shards = self.model, self.model.hidden_size, self._num_expert_shards(tensor)
        rows = -(-self._num_routed_tokens(tokens, tensor) * model.moe_router_topk * self.ranks // model.num_experts)
        width, shared = model.moe_ffn_hidden_size // num_shards, model.moe_shared_expert_intermediate_size // tensor
        num_local, entering = model.num_experts // self.ranks, self.matrices - 1
        products = [Product(tokens, h, model.num_experts)]
        products += [Product(rows, h, entering * width, num_local), Product(rows, width, h, num_local)]
        if shared:
            products += [Product(tokens, h, entering * shared, is_column=True), Product(tokens, shared, h)]
        return tuple(products)

    def saved_bytes(
        self, tokens: int, tensor: int, width: int, sequence: int = 1, *, saves_gathered_inputs: bool = False
    ) -> int:
        """Return the bytes that the feed-forward half saves for backward, excluding the input that a dense half saves.

        Args:
            tokens: tokens of a micro-batch.
            width: bytes per element.
            sequence, saves_gathered_inputs: see ``Costs.unit_saved_bytes``.
        """
        model, h, wide = self.model, self.model.hidden_size, max(width, 4)
        num_experts, k, local_tokens = model.num_experts, model.moe_router_topk, tokens // sequence
        rows = self._num_routed_tokens(tokens, tensor) * k
        between = tokens * self.saved_per_width * self.active_width * width // tensor
        lists = rows * (2 * INDEX_BYTES * (2 if self.ranks > 1 else 1) + 2 * wide) + local_tokens * INDEX_BYTES * k
        tables = self._num_tables * local_tokens * num_experts * wide
        gated = local_tokens * h * width if model.moe_shared_expert_gate else 0
        return (
            2 * rows * h * width
            + between
            + lists
            + tables
            + gated
            + self._input_bytes(local_tokens, tokens, width, saves_gathered_inputs)
        )

    @property
    def _num_tables(self) -> int:
        """Number of tables [tokens, E] that the router saves: one to look up weights, and others for its losses."""
        model = self.model
        is_sigmoid = model.moe_router_score_function == "sigmoid"
        has_logits = not is_sigmoid and not model.moe_router_pre_softmax  # the logits are the table of weights
        softmax = bool(model.has_aux_loss) and not is_sigmoid
        return 1 + softmax + (bool(model.moe_z_loss_coeff) and not has_logits)

    def _input_bytes(self, num_router_tokens: int, tokens: int, width: int, saves_gathered_inputs: bool) -> int:
        """Return the bytes of inputs that the half saves, less the input that a dense half saves.

        The router saves its input, and with 16-bit weights fp32 copies of its input and weight. A shared expert saves
        the same input as a dense half. Other experts save rows, which ``saved_bytes`` counts separately.

        Args:
            num_router_tokens: number of tokens that the router processes.
        """
        h, shared = self.model.hidden_size, self.model.moe_shared_expert_intermediate_size
        dense = (
            (tokens if saves_gathered_inputs else num_router_tokens) * h * width
        )  # saved by a dense half, or by the shared expert
        router = num_router_tokens * h * max(width, 4) + (4 * h * int(self.model.num_experts) if width < 4 else 0)
        if not shared:
            return int(router - dense)
        return 0 if width >= 4 and dense == router else int(router)

    def scratch_bytes(self, tokens: int, tensor: int, width: int, sequence: int = 1) -> int:
        """Return the scratch bytes of the half in backward, less the memory that it has freed by then.

        The gradients of the same weight of all experts exist at the same time, before they are accumulated.
        """
        model, h, k = self.model, self.model.hidden_size, self.model.moe_router_topk
        rows, f = (
            self._num_routed_tokens(tokens, tensor) * k,
            model.moe_ffn_hidden_size // self._num_expert_shards(tensor),
        )
        weights, entering = h * f * (model.num_experts // self.ranks), self.matrices - 1
        held = tokens // sequence * h  # the gradient of the residual stream
        if shared := model.moe_shared_expert_intermediate_size:  # its backward runs first
            held += tokens * h - tokens * self.saved_per_width * shared // tensor
        largest = max(
            2 * rows * h,
            rows * f + weights,
            entering * weights + rows * f * (entering - self.saved_per_width),
        )
        return max(held + largest, 0) * width

    def messages(self, tokens: int, tensor: int, width: int) -> tuple[int, int]:
        """Return the bytes that a rank passes to the all-to-all to the experts, and to the all-to-all back.

        The bytes include rows of local experts. Gradients have the same sizes.
        """
        if self.ranks == 1:
            return 0, 0
        num_bytes = (
            self._num_routed_tokens(tokens, tensor) * self.model.moe_router_topk * self.model.hidden_size * width
        )
        return num_bytes, num_bytes


def exchanged_bytes(counts: Sequence[Sequence[int]], rank: int, hidden_size: int, width: int) -> int:
    """Return the bytes of rows that ``rank`` sends to others for one layer and micro-batch, forward and backward.

    Args:
        counts: number of rows that each expert rank has for each expert, [ranks, E].
        width: bytes per element.
    """
    num_local = len(counts[0]) // len(counts)
    sent = sum(counts[rank]) - sum(counts[rank][rank * num_local : (rank + 1) * num_local])
    received = sum(
        sum(rank_counts[rank * num_local : (rank + 1) * num_local])
        for sender, rank_counts in enumerate(counts)
        if sender != rank
    )
    return 2 * (sent + received) * hidden_size * width
