"""Parameters, products and kept activations of a feed-forward half with experts. No torch.

| count | formula for E experts of f, k of a token, a shared one of f' |
|---|---|
| parameters held | m h (E f + f') + E h for the router, m = 2, gated 3 |
| parameters that a token goes through | m h (k f + f') + E h |
| numbers of a token that are kept beside a dense half's | k f and f' in place of f, 2 k h rows sent and returned |
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.models.common.cost import Product


def feed_forwards(sizes: Any) -> tuple[Any, Any]:
    """Return ``sizes`` with the size of one expert, and with that of all that a token goes through, the shared too."""
    each, shared = sizes.moe_ffn_hidden_size, sizes.moe_shared_expert_intermediate_size
    return replace(sizes, ff_hidden_size=each), replace(sizes, ff_hidden_size=sizes.moe_router_topk * each + shared)


def expert_parameters(
    sizes: Any, matrices: int, tensor: int = 1, *, is_active: bool = False, ranks: int = 1, cuts_experts: bool = True
) -> int:
    """Return the parameters of the half on one of ``tensor`` ranks; the router is whole.

    Args:
        matrices: of one expert.
        is_active: only those that a token goes through.
        ranks: that share out the experts.
        cuts_experts: over the tensor ranks.
    """
    h, number = sizes.hidden_size, sizes.moe_router_topk if is_active else sizes.num_experts // ranks
    width = number * sizes.moe_ffn_hidden_size * (1 if cuts_experts else tensor)
    width += sizes.moe_shared_expert_intermediate_size
    router = sizes.num_experts * (h + sizes.moe_router_enable_expert_bias) + h * sizes.moe_shared_expert_gate
    return matrices * h * width // tensor + router


def expert_products(sizes: Any, matrices: int, tokens: int, tensor: int) -> tuple[Product, ...]:
    """Return the products of the half: of each expert with an even share of the tokens, of the shared one, the router.

    A gated expert makes gate and value in one.
    """
    h, number, f = sizes.hidden_size, sizes.num_experts, sizes.moe_ffn_hidden_size
    rows, shared = -(-tokens * sizes.moe_router_topk // number), sizes.moe_shared_expert_intermediate_size
    found = [Product(tokens, h, number)]
    for own, size, times in ((rows, f, number), (tokens, shared, 1)):
        if size:
            entering = Product(own, h, (matrices - 1) * size // tensor, times, is_column=True)
            found += [entering, Product(own, size // tensor, h, times)]
    return tuple(found)
