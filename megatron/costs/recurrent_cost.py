"""Costs of recurrent mixers: parameters, products, saved activations and messages. Does not import torch.

Symbols: h hidden size, t tensor ranks, k kernel size of the convolution. Delta rule: g key heads of d_k elements,
a value heads of d_v elements. Mamba-2: a heads of d elements, g groups, n elements of the state per channel. A chunk
has C tokens.

| quantity | gated_delta_net | kimi_delta (d = d_k = d_v) | mamba2 |
|---|---|---|---|
| projections | h (2 g d_k + 2 a d_v + 2 a) | h (3 a d + a), and the gates | h (2 a d + 2 g n + a) |
| ... gates | | 2 h d + 2 a d d, or 2 h a d at full rank | |
| ... output | h a d_v | h a d | h a d |
| convolution | k (2 g d_k + a d_v) | 3 k a d | (k + 1) (a d + 2 g n) |
| decays | 2 a | a + a d | 3 a, with D |
| output norm | d_v, on every rank | d, on every rank | a d, or none |
| FLOPs of the state per token in forward | 8 a d_k d_v | 8 a d d | 7 a d n |
| state of a sample | a d_k d_v | a d d | a d n |
| message per sample and chunk | a d_k (d_k + d_v) | 2 a d d | a (1 + d n) |

The FLOPs of the state are counted for the recurrence token by token, as in Megatron-LM. The chunked computation has
more products (``core_products``), which do not count as FLOPs of the model. States and decays are in fp32 for 16-bit
weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from megatron.config.layer_types import GATED_DELTA_NET, KIMI_DELTA, MAMBA2
from megatron.config.recurrent import NO_NORM
from megatron.costs.cost import Product

CHUNK_SIZE = 64
"""Must equal the default chunk sizes of ``megatron.ops.delta_rule`` and ``megatron.ops.state_space``."""


@dataclass(frozen=True)
class RecurrentCosts(ABC):
    """Costs of the recurrent mixer of one layer.

    Args:
        model: sizes of the model.
    """

    model: Any

    @abstractmethod
    def parameters(self, tensor: int = 1) -> int:
        """Return the number of parameters on one of ``tensor`` ranks."""

    @abstractmethod
    def products(self, tokens: int, tensor: int) -> tuple[Product, ...]:
        """Return the projections of ``tokens`` tokens on one of ``tensor`` ranks."""

    @abstractmethod
    def core_products(self, tokens: int, tensor: int) -> tuple[Product, ...]:
        """Return the products of the recurrence, which have no weights.

        The time model reads them in pairs and counts the outputs of the first product of each pair, which are masked or
        decayed, like attention scores.
        """

    @property
    @abstractmethod
    def state_flops(self) -> int:
        """FLOPs of the recurrence per token in forward."""

    @abstractmethod
    def message_numel(self, tensor: int) -> tuple[int, int]:
        """Return the elements per sample and chunk that context ranks exchange.

        Returns:
            Elements of the transition and the final state, in at least fp32, and of the last convolution inputs.
        """

    @abstractmethod
    def saved_bytes(self, tokens: int, tensor: int, width: int) -> tuple[int, int]:
        """Return the bytes that the mixer saves for backward: (in total, by the recurrence between its projections).

        The input of the projections is excluded. With selective recomputation, the second number is not saved.

        Args:
            tokens: tokens of a micro-batch on the rank.
            width: bytes per element of an activation.
        """

    def scratch_bytes(self, tokens: int, tensor: int, width: int) -> int:
        """Return the bytes of gradients that the backward of the recurrence allocates at the same time."""
        return tokens * self._gradient_numel * max(width, 4) // tensor

    @property
    @abstractmethod
    def _gradient_numel(self) -> int:
        """Elements per token of the gradients within a chunk."""


@dataclass(frozen=True)
class DeltaCosts(RecurrentCosts):
    """Costs of Gated DeltaNet."""

    @property
    def key_width(self) -> int:
        """Total size of all key heads, and of all query heads."""
        return int(self.model.linear_num_key_heads * self.model.linear_key_head_dim)

    @property
    def value_width(self) -> int:
        """Total size of all value heads."""
        return int(self.model.linear_num_value_heads * self.model.linear_value_head_dim)

    @property
    def heads(self) -> int:
        return int(self.model.linear_num_value_heads)

    @property
    def _key_size(self) -> int:
        return int(self.model.linear_key_head_dim)

    @property
    def _value_size(self) -> int:
        return int(self.model.linear_value_head_dim)

    @property
    def convolution_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    def parameters(self, tensor: int = 1) -> int:
        sharded = sum(product.weights for product in self.products(1, 1)) - self._replicated_weights
        sharded += self.convolution_width * self.model.linear_conv_kernel_dim + self.heads + self._num_time_steps
        return sharded // tensor + self._replicated_weights + self._value_size

    @property
    def _replicated_weights(self) -> int:
        """Number of elements of the projections that every tensor rank has."""
        return 0

    @property
    def _num_time_steps(self) -> int:
        """Number of elements of ``dt_bias``."""
        return self.heads

    def products(self, tokens: int, tensor: int) -> tuple[Product, ...]:
        return (
            Product(tokens, self.model.hidden_size, self._entering_width // tensor, is_column=True),
            Product(tokens, self.value_width // tensor, self.model.hidden_size),
        )

    @property
    def _entering_width(self) -> int:
        """Total width of the column-parallel projections."""
        return self.convolution_width + self.value_width + 2 * self.heads

    def core_products(self, tokens: int, tensor: int) -> tuple[Product, ...]:
        size, key, value = CHUNK_SIZE, self._key_size, self._value_size
        count = tokens / size * self.heads / tensor
        return (
            Product(size, key, size, count),  # queries and keys
            Product(size, size, value, count),
            Product(size, key, size, count),  # keys and keys
            Product(size, size, key + value, count / 2),  # the triangular system
            Product(size, key, value, count),  # the state, read by keys
            Product(size, key, value, count),  # ... by queries
            Product(key, size, value, count),  # ... and its update
        )

    @property
    def state_flops(self) -> int:
        return 8 * self.heads * self._key_size * self._value_size

    def message_numel(self, tensor: int) -> tuple[int, int]:
        states = self.heads * self._key_size * (self._key_size + self._value_size)
        return states // tensor, (self.model.linear_conv_kernel_dim - 1) * self.convolution_width // tensor

    def saved_bytes(self, tokens: int, tensor: int, width: int) -> tuple[int, int]:
        wide, convolved, values = max(width, 4), self.convolution_width, self.value_width
        core = wide * self._core_numel + (wide - width) * (2 * self.key_width - values)
        outside = 4 * wide * values + width * values + (wide + 2 * width) * convolved + self._gate_bytes(width)
        return round(tokens * (core + outside) / tensor), round(tokens * core / tensor)

    @property
    def _core_numel(self) -> float:
        """Elements per token that the recurrence saves for 32-bit inputs, in addition to its inputs.

        These are keys and queries (decayed, solved, stacked), values, six C x C tables of each chunk, and its state.
        """
        keys, heads = self.heads * self._key_size, self.heads
        states = keys * self._value_size / CHUNK_SIZE
        small = 2 * heads + 2 * self.model.linear_num_key_heads
        return float(10 * keys + 3 * self.value_width + 6 * heads * CHUNK_SIZE + small + states)

    def _gate_bytes(self, width: int) -> int:
        """Return the bytes per token that the computation of decays and beta saves."""
        return self.heads * (4 * max(width, 4) + 2 * width)

    @property
    def _gradient_numel(self) -> int:
        return 3 * self.heads * (self._key_size + self._value_size + CHUNK_SIZE)


@dataclass(frozen=True)
class KimiCosts(DeltaCosts):
    """Costs of Kimi Delta Attention, whose decays are per element of the keys."""

    @property
    def _rank(self) -> int:
        """Size of the latents of decays and gates; 0: they are projected from the hidden state."""
        return 0 if self.model.linear_full_rank_gates else self._key_size

    @property
    def _replicated_weights(self) -> int:
        return 2 * int(self.model.hidden_size) * self._rank

    @property
    def _num_time_steps(self) -> int:
        return self.key_width

    @property
    def _entering_width(self) -> int:
        return self.convolution_width + self.heads + (0 if self._rank else 2 * self.value_width)

    def products(self, tokens: int, tensor: int) -> tuple[Product, ...]:
        entering, leaving = super().products(tokens, tensor)
        if not self._rank:
            return entering, leaving
        down = Product(tokens, self.model.hidden_size, 2 * self._rank)
        return entering, down, Product(tokens, self._rank, self.value_width // tensor, 2), leaving

    @property
    def _core_numel(self) -> float:
        """As in ``DeltaCosts``, with decays per element, the halves of blocks, and three C x C tables of each chunk."""
        num_levels = CHUNK_SIZE.bit_length() - 1
        return super()._core_numel + (2.5 * num_levels + 2) * self.key_width - 3 * self.heads * CHUNK_SIZE

    def _gate_bytes(self, width: int) -> int:
        wide = max(width, 4)
        return 2 * self.key_width * wide + 2 * self._rank * width + self.heads * (wide + width)


@dataclass(frozen=True)
class MambaCosts(RecurrentCosts):
    """Costs of Mamba-2."""

    @property
    def width(self) -> int:
        """Total size of all heads."""
        return int(self.model.mamba_num_heads * self.model.mamba_head_dim)

    @property
    def heads(self) -> int:
        return int(self.model.mamba_num_heads)

    def _state_width(self, tensor: int) -> int:
        """Return the rows of B that one of ``tensor`` ranks stores: all rows if several ranks read one group."""
        model = self.model
        groups = model.mamba_num_groups
        return int(model.mamba_state_dim * (groups // tensor if groups % tensor == 0 else groups))

    def _read_width(self, tensor: int) -> int:
        """Return the rows of B that the heads on one of ``tensor`` ranks read."""
        return int(self.model.mamba_state_dim * max(self.model.mamba_num_groups // tensor, 1))

    def parameters(self, tensor: int = 1) -> int:
        model, h, states = self.model, int(self.model.hidden_size), self._state_width(tensor)
        entering = (2 * self.width + self.heads) // tensor + 2 * states
        biases = entering + h if model.mamba_proj_bias else 0
        channels = self.width // tensor + 2 * states
        convolution = channels * (model.mamba_conv_kernel_dim + model.mamba_conv_bias)
        norm = 0 if model.mamba_norm == NO_NORM else self.width // tensor
        return int(entering * h + biases + convolution + 3 * self.heads // tensor + norm + self.width // tensor * h)

    def products(self, tokens: int, tensor: int) -> tuple[Product, ...]:
        h = self.model.hidden_size
        entering = (2 * self.width + self.heads) // tensor + 2 * self._read_width(tensor)
        return Product(tokens, h, entering, is_column=True), Product(tokens, self.width // tensor, h)

    def core_products(self, tokens: int, tensor: int) -> tuple[Product, ...]:
        size, d, n = CHUNK_SIZE, self.model.mamba_head_dim, self.model.mamba_state_dim
        chunks, heads = tokens / size, self.heads / tensor
        return (
            Product(size, n, size, chunks * max(self.model.mamba_num_groups / tensor, 1)),  # B and C
            Product(size, size, d, chunks * heads),
            Product(d, size, n, chunks * heads),  # the update of the state
            Product(size, n, d, chunks * heads),  # the state, read by C
        )

    @property
    def state_flops(self) -> int:
        return 7 * self.width * int(self.model.mamba_state_dim)

    def message_numel(self, tensor: int) -> tuple[int, int]:
        model = self.model
        channels = self.width // tensor + 2 * self._read_width(tensor)
        states = self.heads * (1 + model.mamba_head_dim * model.mamba_state_dim) // tensor
        return int(states), int((model.mamba_conv_kernel_dim - 1) * channels)

    def saved_bytes(self, tokens: int, tensor: int, width: int) -> tuple[int, int]:
        wide, heads, values = max(width, 4), self.heads / tensor, self.width / tensor
        reads, by_head = self._read_width(tensor), heads * self.model.mamba_state_dim
        states = 2 * values * self.model.mamba_state_dim / CHUNK_SIZE
        groups = max(self.model.mamba_num_groups / tensor, 1)
        core = 4 * values + 2 * reads + 2 * by_head + states + CHUNK_SIZE * (2 * heads + groups) + heads
        norm = 0 if self.model.mamba_norm == NO_NORM else 2 * wide * values
        outside = (wide + 2 * width) * (values + 2 * reads) + (3 * wide + width) * values + norm + 3 * wide * heads
        return round(tokens * (wide * core + outside)), round(tokens * wide * core)

    @property
    def _gradient_numel(self) -> int:
        return 3 * self.width + 2 * self.heads * CHUNK_SIZE


COSTS: dict[str, type[RecurrentCosts]] = {GATED_DELTA_NET: DeltaCosts, KIMI_DELTA: KimiCosts, MAMBA2: MambaCosts}
"""Recurrent mixer -> its costs."""
