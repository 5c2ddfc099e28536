"""The parts of which layers of every model are made: their parameters, products and kept activations.

| part | parameters in products | FLOPs of a token, forward |
|---|---|---|
| attention | 4 h a d: queries, keys, values, output | 8 h a d, and 4 s a d for scores and their sums |
| feed-forward | 2 h f; gated 3 h f | 4 h f; gated 6 h f |
| head | h v | 2 h v |
"""

from __future__ import annotations

from typing import Protocol

from megatron.cost.work import Product

ELEMENTWISE = 64
"""Cost of passing over one number (norm, softmax) in FLOPs of a matrix product. With it a head counts 2.77 layers where
212 ms beside 75 ms were measured, 2.83 layers (h 256, v 8192, s 256, two CPU cores)."""

KEPT = 2**24
"""Probabilities that T5's blocked attention keeps for backward at most: ``megatron.ops.biased_attention.KEPT``."""


class Sizes(Protocol):
    """What is read of a model; ``ModelConfig`` and ``megatron.model.Sizes`` have it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def kv_hidden_size(self) -> int: ...
    @property
    def ff_hidden_size(self) -> int: ...
    @property
    def hidden_bias(self) -> bool: ...
    @property
    def activation(self) -> str: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def untie_embeddings(self) -> bool: ...
    @property
    def loss_chunk_tokens(self) -> int | None: ...


def between_bytes(hidden: int, masks: int, sequence: int, *, is_joined: bool = False) -> int:
    """Return the bytes that layers keep between the products, where ``sequence`` ranks share the tokens.

    Args:
        hidden: bytes of the hidden states that norms read, and as many that products do.
        masks: bytes of the masks of dropout.
        is_joined: the inputs of the products are whole.
    """
    return hidden + (hidden + masks) // sequence if is_joined else (2 * hidden + masks) // sequence


def attention_width(sizes: Sizes) -> int:
    """Return a d: the size of all heads together."""
    return sizes.num_attention_heads * sizes.kv_hidden_size


def known_vocab_size(sizes: Sizes) -> int:
    """Return v.

    Raises:
        ValueError: it is not known yet.
    """
    if sizes.vocab_size is None:
        raise ValueError("vocab_size is not known yet: call config.with_vocab(size) first")
    return sizes.vocab_size


def attention_parameters(sizes: Sizes, tensor: int = 1, keys: int | None = None) -> int:
    """Return the parameters of one attention on one of ``tensor`` ranks; the output's bias is whole.

    Args:
        keys: size of all keys together, and of all values; None: as that of the queries.
    """
    h, width = sizes.hidden_size, attention_width(sizes)
    keys = width if keys is None else keys
    cut = 2 * h * (width + keys) + (width + 2 * keys if sizes.hidden_bias else 0)
    return cut // tensor + (h if sizes.hidden_bias else 0)


def feed_forward_parameters(sizes: Sizes, tensor: int = 1) -> int:
    """Return the parameters of one feed-forward layer on one of ``tensor`` ranks; the output's bias is whole."""
    h, f, matrices = sizes.hidden_size, sizes.ff_hidden_size, _matrices(sizes)
    cut = matrices * h * f + ((matrices - 1) * f if sizes.hidden_bias else 0)
    return cut // tensor + (h if sizes.hidden_bias else 0)


def table_parameters(sizes: Sizes, tensor: int = 1) -> int:
    """Return the rows of the word table on one rank times h: the input embedding, and an untied head alike."""
    return -(-known_vocab_size(sizes) // tensor) * sizes.hidden_size


def projections_flops(sizes: Sizes, keys: int | None = None) -> int:
    """Return the FLOPs of one token in the four products of an attention: 8 h a d; ``keys`` as above."""
    width = attention_width(sizes)
    return 4 * sizes.hidden_size * (width + (width if keys is None else keys))


def feed_forward_flops(sizes: Sizes) -> int:
    """Return the FLOPs of one token in a feed-forward layer: 4 h f, gated 6 h f."""
    return 2 * _matrices(sizes) * sizes.hidden_size * sizes.ff_hidden_size


def layer_products(sizes: Sizes, tokens: int, tensor: int, keys: int | None = None) -> tuple[Product, ...]:
    """Return the products with weights of a layer on one of ``tensor`` ranks: attention and feed-forward."""
    return (*attention_products(sizes, tokens, tensor, keys), *feed_forward_products(sizes, tokens, tensor))


def attention_products(sizes: Sizes, tokens: int, tensor: int, keys: int | None = None) -> tuple[Product, ...]:
    """Return the products of queries, keys and values, and of the output."""
    h, width = sizes.hidden_size, attention_width(sizes)
    keys = width if keys is None else keys
    return Product(tokens, h, (width + 2 * keys) // tensor, is_column=True), Product(tokens, width // tensor, h)


def feed_forward_products(sizes: Sizes, tokens: int, tensor: int) -> tuple[Product, ...]:
    """Return the two products of a feed-forward layer; a gated one makes gate and value in one."""
    h, f = sizes.hidden_size, sizes.ff_hidden_size
    entering = Product(tokens, h, (_matrices(sizes) - 1) * f // tensor, is_column=True)
    return entering, Product(tokens, f // tensor, h)


def head_cost(sizes: Sizes) -> int:
    """Return the cost of one token in the head and its softmax, in FLOPs of a matrix product."""
    return (2 * sizes.hidden_size + ELEMENTWISE) * known_vocab_size(sizes)


def feed_forward_kept(sizes: Sizes) -> int:
    """Return how many numbers between its two products a feed-forward layer keeps for a token.

    2 f: before and after the activation. ReLU keeps its result alone; a gated layer gate, value, activation, product.
    """
    return sizes.ff_hidden_size * (4 if _is_gated(sizes) else 1 if sizes.activation == "relu" else 2)


def _matrices(sizes: Sizes) -> int:
    return 3 if _is_gated(sizes) else 2


def _is_gated(sizes: Sizes) -> bool:
    return sizes.activation.startswith("gated-")
