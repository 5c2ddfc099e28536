"""Costs for a feed-forward block with experts: parameters, products, saved activations, scratch memory and messages.

All costs except parameters assume a balanced load: every expert receives the same number of tokens. If a rank's
experts receive more tokens, this rank's costs grow in proportion. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.costs.cost import Product

# Symbols: E experts of width f, k experts per token, a shared expert of width f', m matrices per expert (2, or 3 if
# gated), n tokens of a micro-batch on a rank, e expert ranks, t tensor ranks. With --expert-tensor-parallel-size u < t,
# u takes the place of t for experts, and each rank routes n u / t tokens.
#
# | quantity | formula |
# |---|---|
# | parameters in total | m h (E f + f') + E h, the latter for the router |
# | active parameters, which a token uses | m h (k f + f') + E h |
# | parameters on a rank | m h (E f / e + f') / t + E h |
# | coefficients (--moe-use-residual) | 2 h + 2 in each of the three rows above |
# | biases (--hidden-bias) | (m - 1) f / t + h per expert, E for the router |
# | rows for the experts of a rank | n k |
# | saved elements | 2 n k h for received rows and returned results, and activations of width k f + f' |
# | saved bytes | 8 n k for the row permutation (twice if e > 1), 8 n k for expert indices, 4 n E per router table |
# | ... | the weights of the n k choices, in fp32 as the router normalises them and in the dtype of the results |
# | ... in 16 bits | also fp32 copies of the router's input and weight |
# | scratch of backward | two gradients of the returned results, or one weight's gradients for all experts |
# | all-to-all | n k h elements to the experts and n k h back; the same for their gradients |
#
# The exchange of row counts (8 E bytes per rank and layer) is not counted.

ROW_INDEX_BYTES = 4
"""Bytes of the index of a row."""
EXPERT_INDEX_BYTES = 8
"""Bytes of the index of an expert."""


@dataclass(frozen=True)
class ExpertCosts:
    """Costs for one layer's experts, router and shared expert.

    Args:
        model: model sizes.
        matrices: matrices per expert, counting gate and value separately.
        saved_per_width: elements that a feed-forward layer saves between its products, per token and per unit
            of width.
        ranks: ranks over which experts are distributed.
        expert_tensor: tensor ranks over which each expert is sharded; 0: all.
    """

    model: Any
    matrices: int
    saved_per_width: int
    ranks: int = 1
    expert_tensor: int = 0

    @property
    def active_width(self) -> int:
        """Total width of all experts that a token uses, including the shared expert."""
        model = self.model
        return int(model.moe_router_topk * model.moe_ffn_hidden_size + model.moe_shared_expert_intermediate_size)

    @property
    def flops(self) -> int:
        """FLOPs per token in forward."""
        num_router_rows = int(self.model.num_experts) + self._num_coefficients
        return 2 * self.model.hidden_size * (self.matrices * self.active_width + num_router_rows)

    @property
    def _num_coefficients(self) -> int:
        """Number of weights per token for the outputs of the routed experts and of the shared expert; 0 or 2."""
        return 2 * self.model.moe_use_residual

    def parameters(self, tensor: int = 1, *, is_active: bool = False) -> int:
        """Count the block's parameters on one of ``tensor`` ranks; the router is not sharded.

        Args:
            is_active: count only the parameters that a token uses.
        """
        model, h = self.model, self.model.hidden_size
        experts = self._expert_parameters(
            tensor, model.moe_router_topk if is_active else model.num_experts // self.ranks
        )
        shared_size = model.moe_shared_expert_intermediate_size
        shared = self.matrices * h * shared_size // tensor + self._num_biases(shared_size, tensor)
        router = model.num_experts * (h + model.moe_router_enable_expert_bias + model.hidden_bias)
        router += h * model.moe_shared_expert_gate + self._num_coefficients * (h + 1)
        return int(experts + shared + router)

    def distributed_parameters(self, tensor: int = 1) -> int:
        """Count the parameters whose copies are not exactly those of the data x context ranks."""
        return self._expert_parameters(tensor, self.model.num_experts // self.ranks) if self._is_apart(tensor) else 0

    def _is_apart(self, tensor: int) -> bool:
        """Return True if experts are distributed over ranks, or sharded over fewer tensor ranks than other layers."""
        return self.ranks > 1 or self.num_shards(tensor) < tensor

    def num_copies(self, replicas: int, tensor: int) -> int:
        """Return the number of ranks that hold the same experts and the same shard of them."""
        return max(replicas * tensor // (self.num_shards(tensor) * self.ranks), 1)

    def _expert_parameters(self, tensor: int, num_experts: int) -> int:
        f, num_shards = int(self.model.moe_ffn_hidden_size), self.num_shards(tensor)
        weights = self.matrices * int(self.model.hidden_size) * num_experts * f // num_shards
        return weights + num_experts * self._num_biases(f, num_shards)

    def _num_biases(self, size: int, num_shards: int) -> int:
        """Count the biases in an expert with width ``size``; output biases are not sharded."""
        if not self.model.hidden_bias or not size:
            return 0
        return (self.matrices - 1) * size // num_shards + int(self.model.hidden_size)

    def num_shards(self, tensor: int) -> int:
        """Return the number of tensor ranks, out of ``tensor``, over which an expert is sharded."""
        return min(self.expert_tensor or tensor, tensor)

    def _num_routed_tokens(self, tokens: int, tensor: int) -> int:
        return tokens * self.num_shards(tensor) // tensor

    def reduced_bytes(self, hidden: int, tensor: int) -> tuple[int, ...]:
        """Return the bytes of the all-reduces in forward: one for experts, one for the shared expert.

        An all-reduce over fewer tensor ranks has fewer tokens. It counts as one over all of them in which a rank sends
        as many bytes.

        Args:
            hidden: bytes of the hidden states of a micro-batch.
        """
        num_shards, shared = self.num_shards(tensor), (hidden,) * bool(self.model.moe_shared_expert_intermediate_size)
        if num_shards == tensor:
            return (hidden, *shared)
        return (hidden * (num_shards - 1) // (tensor - 1),) * (num_shards > 1) + shared

    def products(self, tokens: int, tensor: int) -> tuple[Product, ...]:
        """List the products for the router, the local experts and the shared expert.

        Each expert processes an equal share of all expert ranks' rows. A gated expert computes gate and value in
        one product.
        """
        model, h, num_shards = self.model, self.model.hidden_size, self.num_shards(tensor)
        rows = -(-self._num_routed_tokens(tokens, tensor) * model.moe_router_topk * self.ranks // model.num_experts)
        width, shared = model.moe_ffn_hidden_size // num_shards, model.moe_shared_expert_intermediate_size // tensor
        num_local, entering = model.num_experts // self.ranks, self.matrices - 1
        products = [Product(tokens, h, model.num_experts)]
        expert_shapes = ((h, entering * width), (width, h))
        products += [
            Product(rows, *shape, num_local, is_distributed=self._is_apart(tensor), is_quantizable=True)
            for shape in expert_shapes
        ]
        if shared:
            products += [
                Product(tokens, h, entering * shared, is_column=True, is_quantizable=True),
                Product(tokens, shared, h, is_quantizable=True),
            ]
        if self._num_coefficients:
            products.append(Product(tokens, h, self._num_coefficients))
        return tuple(products)

    def saved_bytes(
        self, tokens: int, tensor: int, width: int, sequence: int = 1, *, saves_gathered_inputs: bool = False
    ) -> int:
        """Compute the bytes that the block saves for backward, excluding the input that a dense block saves.

        Args:
            tokens: tokens per micro-batch.
            width: bytes per element.
            sequence, saves_gathered_inputs: see ``Costs.unit_saved_bytes``.
        """
        model, h, wide = self.model, self.model.hidden_size, max(width, 4)
        num_experts, k, local_tokens = model.num_experts, model.moe_router_topk, tokens // sequence
        rows = self._num_routed_tokens(tokens, tensor) * k
        between = tokens * self.saved_per_width * self.active_width * width // tensor
        num_permutations = 2 if self.ranks > 1 else 1
        # over the k choices; the softmax over all experts is one of the tables
        is_normalised = model.moe_router_score_function == "sigmoid" or not model.moe_router_pre_softmax
        weights = rows * (width + wide * is_normalised)
        lists = rows * 2 * ROW_INDEX_BYTES * num_permutations + local_tokens * EXPERT_INDEX_BYTES * k
        tables = self._num_tables * local_tokens * num_experts * wide
        num_weighted_outputs = 2 if model.moe_use_residual else int(model.moe_shared_expert_gate)
        weighted = num_weighted_outputs * local_tokens * h * width
        return (
            2 * rows * h * width
            + between
            + weights
            + lists
            + tables
            + weighted
            + self._input_bytes(local_tokens, tokens, width, saves_gathered_inputs)
        )

    @property
    def _num_tables(self) -> int:
        """Number of tables [tokens, E] that the router saves: one to look up weights, and up to two for its losses."""
        model = self.model
        is_sigmoid = model.moe_router_score_function == "sigmoid"
        has_logits = not is_sigmoid and not model.moe_router_pre_softmax  # weights are looked up in the logits
        softmax = bool(model.has_aux_loss) and not is_sigmoid
        return 1 + softmax + (bool(model.moe_z_loss_coeff) and not has_logits)

    def _input_bytes(self, num_router_tokens: int, tokens: int, width: int, saves_gathered_inputs: bool) -> int:
        """Compute the bytes of the block's saved inputs, minus the input that a dense block saves.

        The router saves its input; with 16-bit weights it saves fp32 copies of input and weight. A shared expert
        saves the same input as a dense block. Other experts save rows, which ``saved_bytes`` counts separately.

        Args:
            num_router_tokens: tokens that the router processes.
        """
        h, shared = self.model.hidden_size, self.model.moe_shared_expert_intermediate_size
        num_saved_tokens = tokens if saves_gathered_inputs else num_router_tokens
        dense = num_saved_tokens * h * width  # saved by a dense block, or by the shared expert
        router = num_router_tokens * h * max(width, 4) + (4 * h * int(self.model.num_experts) if width < 4 else 0)
        if not shared:
            return int(router - dense)
        return 0 if width >= 4 and dense == router else int(router)

    def scratch_bytes(self, tokens: int, tensor: int, width: int, sequence: int = 1) -> int:
        """Compute the block's scratch bytes in backward, minus the memory that it has freed before.

        For each weight, all experts' gradients exist at the same time until they are accumulated.
        """
        model, h, k = self.model, self.model.hidden_size, self.model.moe_router_topk
        rows = self._num_routed_tokens(tokens, tensor) * k
        f = model.moe_ffn_hidden_size // self.num_shards(tensor)
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
        """Compute the bytes that a rank passes to the dispatch and combine all-to-alls.

        Local experts' rows are included. Gradients have the same sizes.
        """
        if self.ranks == 1:
            return 0, 0
        num_bytes = (
            self._num_routed_tokens(tokens, tensor) * self.model.moe_router_topk * self.model.hidden_size * width
        )
        return num_bytes, num_bytes


def exchanged_bytes(counts: Sequence[Sequence[int]], rank: int, hidden_size: int, width: int) -> int:
    """Compute row bytes that ``rank`` sends to other ranks in forward and backward, per layer and micro-batch.

    Args:
        counts: row counts from each expert rank to each expert, [ranks, E].
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
