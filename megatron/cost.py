"""What a GPT-2 costs: parameters, FLOPs, memory; and how its layers are shared out over stages. Arithmetic only.

| count | formula | |
|---|---|---|
| N | parameters in matrix products: without input embeddings, with the head | a tied head counts |
| FLOPs per token, causal half counted | 6 N + 6 L a d s | the convention of our MFU |
| FLOPs per token, full attention matrix | 12 L a d s in place of 6 | the convention of many papers |

Letters as in docs/glossary.md: ``L`` layers, ``h`` hidden, ``a`` heads, ``d`` size of a head, ``f`` feed-forward,
``v`` vocabulary, ``s`` sequence, ``b`` micro-batch, ``t`` tensor size, ``p`` stages. Forward and backward: 3 x forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

from megatron.stages import balanced_bounds, in_flight, layers_in_chunks, pieces_on

ELEMENTWISE = 64
"""Cost of passing over one number (norm, softmax) in FLOPs of a matrix product. With it a head counts 2.77 layers where
212 ms beside 75 ms were measured, 2.83 layers (h 256, v 8192, s 256, two CPU cores)."""

PEAK_TFLOPS = {
    "H100 PCIE": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "H20": 148.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "V100": 125.0,
    "MI300X": 1300.0,
}
"""Dense 16-bit peaks (bf16; fp16 on V100), by a part of the device's name; the longest part that fits is taken."""

Number = TypeVar("Number", int, float)
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


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
    def max_position_embeddings(self) -> int: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def untie_embeddings(self) -> bool: ...


def layer_parameters(sizes: Sizes, tensor: int = 1) -> int:
    """Return the parameters of one transformer layer on one of ``tensor`` ranks; norms and output biases are whole."""
    h, f, width = sizes.hidden_size, sizes.ff_hidden_size, _width(sizes)
    cut = 4 * h * width + 2 * h * f + (3 * width + f if sizes.hidden_bias else 0)
    whole = 4 * h + (2 * h if sizes.hidden_bias else 0)
    return cut // tensor + whole


def table_parameters(sizes: Sizes, tensor: int = 1) -> int:
    """Return the rows of the word table on one rank times h: the input embedding, and an untied head alike."""
    return -(-_vocabulary(sizes) // tensor) * sizes.hidden_size


def num_parameters(sizes: Sizes) -> int:
    """Return the parameters of the whole model; a tied head counts once, padded rows of the vocabulary not at all."""
    positions = sizes.max_position_embeddings * sizes.hidden_size
    tables = table_parameters(sizes) * (2 if sizes.untie_embeddings else 1)
    return tables + positions + sizes.num_layers * layer_parameters(sizes) + 2 * sizes.hidden_size


def stage_parameters(sizes: Sizes, bounds: Sequence[int], tensor: int = 1, stages: int | None = None) -> list[int]:
    """Return the parameters that one rank of each stage holds; a tied table lies on the first and the last stage.

    Args:
        bounds: as ``stage_bounds`` returns them, over embedding, layers, final norm and head.
        stages: their number; None: one for each piece.
    """
    table, positions = table_parameters(sizes, tensor), sizes.max_position_embeddings * sizes.hidden_size
    units = [table + positions, *[layer_parameters(sizes, tensor)] * sizes.num_layers, 2 * sizes.hidden_size, table]
    held = _on_stages(units, bounds, stages)
    if len(held) == 1 and not sizes.untie_embeddings:
        held[0] -= table
    return held


def piece_costs(sizes: Sizes, bounds: Sequence[int], seq_length: int) -> list[float]:
    """Return the cost of each piece, with one layer as 1.0."""
    return _on_stages(unit_costs(sizes, seq_length), bounds, None)


def _on_stages(units: Sequence[Number], bounds: Sequence[int], stages: int | None) -> list[Number]:
    """Return the sum of ``units`` over the pieces of each stage."""
    number = stages or len(bounds) - 1
    each = [[unit for start, stop in pieces_on(bounds, number, i) for unit in units[start:stop]] for i in range(number)]
    return [sum(own) for own in each]


def flops_per_token(sizes: Sizes, seq_length: int, *, causal: bool = True) -> float:
    """Return the FLOPs of forward and backward for one token; recompute is not counted.

    Args:
        causal: count the lower half of the attention matrix only, 6 L a d s; else all of it, 12 L a d s.

    Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 5.1.
    """
    head = _vocabulary(sizes) * sizes.hidden_size
    products = sizes.num_layers * layer_parameters(sizes) + 2 * sizes.hidden_size + head
    return 6.0 * products + (6.0 if causal else 12.0) * sizes.num_layers * _width(sizes) * seq_length


def unit_costs(sizes: Sizes, seq_length: int) -> list[float]:
    """Return the cost of embedding, each layer, final norm and head, with one layer as 1.0."""
    h, f, width, v = sizes.hidden_size, sizes.ff_hidden_size, _width(sizes), _vocabulary(sizes)
    layer = 8 * h * width + 4 * h * f + 2 * seq_length * width
    norm = ELEMENTWISE * h
    head = 2 * h * v + ELEMENTWISE * v
    return [norm / layer, *[1.0] * sizes.num_layers, norm / layer, head / layer]


def stage_bounds(sizes: Sizes, seq_length: int, stages: int, chunks: int = 1) -> list[int]:
    """Return the bounds of the pieces over embedding, layers, final norm and head; each piece has a layer at least.

    The embedding is in the first piece, norm and head are in the last. With one chunk the slowest stage is as fast as
    contiguous layers allow; with more, ``layers_in_chunks`` says the rule.

    Raises:
        ValueError: fewer layers than pieces.
    """
    costs = unit_costs(sizes, seq_length)
    if stages == 1:
        return [0, len(costs)]
    if chunks > 1:
        pieces = layers_in_chunks(sizes.num_layers, stages, chunks, costs[0], costs[-2] + costs[-1])
        return [0, *[1 + bound for bound in accumulate(pieces[:-1])], len(costs)]
    layers = costs[1:-2]
    layers[:1] = [cost + costs[0] for cost in layers[:1]]
    layers[-1:] = [cost + costs[-2] + costs[-1] for cost in layers[-1:]]
    inner = balanced_bounds(layers, stages)[1:-1]
    return [0, *[bound + 1 for bound in inner], len(costs)]


@dataclass(frozen=True)
class Memory:
    """Bytes that training holds on one rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def memory_per_stage(
    sizes: Sizes,
    bounds: Sequence[int],
    *,
    seq_length: int,
    micro_batch_size: int,
    num_micro_batches: int = 1,
    tensor: int = 1,
    dtype: str = "fp32",
    optimizer: str = "adamw",
    checkpoint_activations: bool = False,
    schedule: str = "1f1b",
    chunks: int = 1,
) -> list[Memory]:
    """Return an estimate of what one rank of each stage holds, with the micro-batches that its schedule keeps.

    16-bit weights have fp32 masters, gradients and moments (18 bytes per parameter with AdamW); others 16 or 32 in all.
    Attention keeps no s x s matrix. A stage's chunks count as alike. Allocator, kernels' work space and Python are not
    counted.

    Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.
    """
    width, stages = BYTES[dtype], (len(bounds) - 1) // chunks
    state = max(width, 4)
    master = state if width < 4 else 0
    moments = 2 * state if optimizer == "adamw" else 0
    tokens = seq_length * micro_batch_size
    full = tokens * _layer_bytes(sizes, tensor, width)
    logits = tokens * -(-_vocabulary(sizes) // tensor) * (width + 4)
    estimates = []
    for stage, held in enumerate(stage_parameters(sizes, bounds, tensor, stages)):
        layers = num_layers_on(sizes, bounds, stages, stage)
        kept = in_flight(stages, num_micro_batches, schedule, chunks, stage) * layers // chunks
        recomputed = kept * tokens * sizes.hidden_size * width + full if layers else 0
        estimates.append(
            Memory(
                weights=held * width,
                gradients=held * state,
                optimizer=held * (master + moments),
                activations=recomputed if checkpoint_activations else kept * full,
                logits=logits if stage == stages - 1 else 0,
            )
        )
    return estimates


def num_layers_on(sizes: Sizes, bounds: Sequence[int], stages: int, stage: int) -> int:
    """Return how many transformer layers lie on ``stage``."""
    return sum(min(stop, sizes.num_layers + 1) - max(start, 1) for start, stop in pieces_on(bounds, stages, stage))


def _layer_bytes(sizes: Sizes, tensor: int, width: int) -> int:
    """Bytes per token that one layer keeps: 34 h in 16 bits when f = 4 h, a d = h and t = 1."""
    whole = 4 * sizes.hidden_size * width + 2 * sizes.hidden_size
    cut = (4 * _width(sizes) + 2 * sizes.ff_hidden_size) * width
    return whole + cut // tensor


def peak_flops(device_name: str) -> float | None:
    """Return the dense 16-bit FLOP/s of a GPU by its name, or None for one that the table does not know."""
    name = device_name.upper()
    parts = [part for part in PEAK_TFLOPS if all(word in name for word in part.split())]
    return PEAK_TFLOPS[max(parts, key=len)] * 1e12 if parts else None


def _width(sizes: Sizes) -> int:
    return sizes.num_attention_heads * sizes.kv_hidden_size


def _vocabulary(sizes: Sizes) -> int:
    if sizes.vocab_size is None:
        raise ValueError("vocab_size is not known yet: call config.with_vocab(size) first")
    return sizes.vocab_size
