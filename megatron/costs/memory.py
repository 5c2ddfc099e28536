"""Bytes: states, ZeRO, activations, buffers, recompute, loss, scratch; peak FLOPs of GPUs. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.config.loss_chunk import WHOLE, tokens_at_once
from megatron.costs.dimensions import ModelDimensions, known_vocab_size

# Bytes that training holds: weights, gradients, optimizer, activations and logits.
#
# 16-bit weights have fp32 masters, gradients and moments (18 bytes per parameter with AdamW); others 16 or 32 in all.
# SGD has no moments; Muon has a momentum for matrices of layers where AdamW has two moments (14 bytes, not 18), and for
# all else AdamW's; Adafactor's means of rows and columns are small and not counted. A state of AdamW's in bf16 has 2
# bytes, not 4. With ZeRO over d replicas, AdamW:
#
# | bytes of a parameter | 16 bits | fp32 |
# |---|---|---|
# | ZeRO 0 | 2 + 4 + 12 | 4 + 4 + 8 |
# | ZeRO 1 | 2 + 4 + 12 / d | 4 + 4 + 8 / d |
# | ZeRO 2 | 2 + (4 + 12) / d | 4 + (4 + 8) / d |
# | ZeRO 3 | (2 + 4 + 12) / d | (4 + 4 + 8) / d |
# | ... and of those gathered: tables and the largest layer, twice where the next one is on its way | 2 | 4 |
# | ... of experts that e of the d replicas share out, ZeRO 1 | 2 + 4 + 12 e / d | 4 + 4 + 8 e / d |
# | offload of the optimizer, on the CPU | 12, or 12 / d | the same: its own copy of the weight |
# | offload of the weights, on the CPU | 2 / d | 4 / d, none where the optimizer is there too |
#
# Sums on their way are ``CommunicationBuffers``. Not counted: what backward has left in a bucket that is not full, what
# ZeRO 1 and 2 gather after an update, and the gradients that a step copies to the CPU. Parts are whole vectors
# (``ParamPartition``), so some replicas hold a row more of a weight; a recomputed run of several layers is gathered
# together.
#
# Source of the activations of layers: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
# models", section 4, without scores, which a fused kernel makes once more. The memory in which a GPT-2's attention
# works on a CPU (below) counts where it is more than what its layer has let go and the logits. What
# else holds a number for each query and key, T5's relative biases and the probabilities of its blocked attention on a
# CPU, is counted with T5's layers. Where attention drops on a CPU, or with --layout-independent-dropout, the
# probabilities count too (5 a s / h of s b h), but for T5.

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Memory:
    """Bytes that training holds on one rank: ``gathered`` weights with ZeRO 3 alone, ``host`` what is offloaded,
    ``buffers`` messages on their way.

    At the start ZeRO 3 holds no more than its parts and, on the host, one weight in fp32 (``training.arriving``).
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    gathered: int = 0
    host: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device: all but ``host``."""
        states = self.weights + self.gathered + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.buffers


@dataclass(frozen=True)
class Zero:
    """How ``replicas`` share what training holds, what of it lies on the CPU, and if layers are gathered ahead."""

    stage: int = 0
    replicas: int = 1
    offload_optimizer: bool = False
    offload_parameters: bool = False
    prefetches: bool = True

    @property
    def layers(self) -> int:
        """Layers that ZeRO 3 has gathered at most."""
        return 2 if self.prefetches and self.replicas > 1 else 1

    def share(self, stage: int) -> int:
        """Return how many replicas share what is cut from ``stage`` on."""
        return self.replicas if self.stage >= stage else 1


PLAIN = Zero()


@dataclass(frozen=True)
class State:
    """Bytes of one parameter: its weight, its gradient, and what the optimizer keeps; ``saved`` less of it where the
    parameter is of a matrix of a layer.
    """

    width: int
    gradient: int
    optimizer: int
    saved: int = 0

    @classmethod
    def of(cls, dtype: str, optimizer: str, num_bf16_states: int = 0) -> State:
        """Return the bytes of a parameter.

        Args:
            optimizer: ``OptimizerConfig.state_type``.
            num_bf16_states: of AdamW's two.
        """
        width = BYTES[dtype]
        wide = max(width, 4)
        master = wide if width < 4 else 0
        moments = (2 - num_bf16_states) * wide + num_bf16_states * BYTES["bf16"]
        states = {"adamw": moments, "muon": moments, "momentum": wide}.get(optimizer, 0)
        return cls(width, wide, master + states, states - wide if optimizer == "muon" else 0)

    def memory(
        self,
        parameters: int,
        activations: int,
        logits: int,
        zero: Zero = PLAIN,
        gathered: int = 0,
        matrices: int = 0,
        apart: int = 0,
        ranks: int = 1,
    ) -> Memory:
        """Return the bytes of a rank of a model part of so many ``parameters``, ``gathered`` of them at a time.

        Args:
            matrices: parameters in matrices of layers.
            apart: parameters of experts, which ``ranks`` ranks share out; ``replicas / ranks`` have the same.
        """
        wide, is_cut = max(self.width, 4), zero.stage == 3
        weights = -(-parameters * self.width // zero.share(3))
        optimizer = self.optimizer
        if self.width == wide and zero.offload_optimizer != zero.offload_parameters:
            optimizer += wide  # the master cannot be the weight
        share = zero.share(1)
        states = -(-((parameters - apart) * optimizer - matrices * self.saved) // share)
        states += -(-apart * optimizer * ranks // max(share, ranks))
        cuts = is_cut and (zero.replicas > 1 or zero.offload_parameters)
        on_host = (states if zero.offload_optimizer else 0) + (weights if zero.offload_parameters else 0)
        return Memory(
            weights=0 if zero.offload_parameters else weights,
            gradients=-(-parameters * self.gradient // zero.share(2)),
            optimizer=0 if zero.offload_optimizer else states,
            activations=activations,
            logits=logits,
            gathered=gathered * self.width if cuts else 0,
            host=on_host,
        )


# What recompute keeps of a forward: inputs of runs of layers, and where they wait for their backward.


@dataclass(frozen=True)
class Kept:
    """Bytes that a unit keeps of a micro-batch until its backward: in full, or its input when it is recomputed.

    ``core`` of ``full`` is kept by what selective recompute runs again.
    """

    full: int = 0
    input: int = 0
    core: int = 0

    def without_core(self) -> Kept:
        """Return what is left where selective recompute runs."""
        return replace(self, full=self.full - self.core, core=0)


@dataclass(frozen=True)
class SavedActivations:
    """One input for ``every`` layers, of which each of ``parts`` tensor ranks keeps a part; or on the host."""

    every: int = 1
    parts: int = 1
    is_on_host: bool = False

    def placed(
        self, memory: Memory, pieces: Sequence[Sequence[Kept]], forwards: float, read: int, work: int = 0
    ) -> Memory:
        """Return ``memory`` with what recompute keeps of so many ``forwards`` through all ``pieces`` of a stage.

        Args:
            read: bytes that all layers of the pieces read, of one forward; they count in full and on the device.
            work: bytes that the backward of a layer that was run again works in.
        """
        inputs = sum(sum([unit.input for unit in piece if unit.input][:: self.every]) for piece in pieces)
        waits = -(-int(forwards * inputs) // self.parts)
        others = sum(unit.full for piece in pieces for unit in piece if not unit.input)
        run_again = max(
            sum(sorted((unit.full for unit in piece if unit.input), reverse=True)[: self.every]) for piece in pieces
        )
        again = max(run_again + work - memory.logits, 0)  # the logits are gone when a layer runs again
        on_device, on_host = (0, waits) if self.is_on_host else (waits, 0)
        kept = int(forwards * (read + others)) + on_device
        return replace(memory, activations=kept + again, host=memory.host + on_host)


def waiting_of(config: Any) -> SavedActivations:
    """Return how a run of ``config``, a ``megatron.config.Config``, keeps the inputs of what it recomputes."""
    parallel = config.parallel
    parts = parallel.model_parallel_size if parallel.partition_activations else 1
    return SavedActivations(parallel.checkpoint_num_layers, parts, parallel.checkpoint_in_cpu)


# Bytes of the head and the loss on the last stage, between a forward and its backward and while they work.
#
# | logits | at work | kept by each micro-batch in flight |
# |---|---|---|
# | together | in the weights' format; in 16 bits an fp32 copy | their fp32 softmax |
# | in chunks | a chunk's in fp32, of several ranks two; in 16 bits copies | two gradients |
#
# The gradients are those of the hidden states and, in fp32, of the table. Copies are of a chunk and of
# the latter. Which of the two it is: ``megatron.config.loss_chunk.tokens_at_once``.


def loss_bytes(
    sizes: ModelDimensions,
    tokens: int,
    tensor: int,
    width: int,
    *,
    forwards: int = 1,
    is_on_cpu: bool = False,
    has_cap: bool = False,
) -> int:
    """Return the bytes that the logits of ``tokens`` tokens and their loss need on one of ``tensor`` ranks.

    Args:
        tokens: of a micro-batch.
        width: bytes of a weight.
        forwards: micro-batches that wait for their backward.
        has_cap: logits are soft-capped; a number more for each is kept, in chunks of the chunk at work.
    """
    words, wide, h = -(-known_vocab_size(sizes) // tensor), max(width, 4), sizes.hidden_size
    at_once = tokens_at_once(sizes.loss_chunk_tokens, tokens, known_vocab_size(sizes), h, is_on_cpu=is_on_cpu)
    if at_once == WHOLE:
        kept = wide + (width if has_cap else 0)
        return tokens * words * (width + (wide if width < wide else 0) + kept * forwards)
    copies = width if width < wide else 0
    pieces = (2 if tensor > 1 else 1) * (2 if has_cap else 1)
    at_work = words * (at_once * (wide * pieces + copies) + h * copies)
    return at_work + forwards * h * (tokens * width + words * wide)


# Bytes in which causal attention works on a CPU, one layer at a time: in fp32 a head at a time for each thread.
#
# There ``megatron/ops/causal_kernel.cpp`` does it. In fp64, and where that could not be built, it goes block by block:
#
# | numbers, of each of the n heads that are worked on together | |
# |---|---|
# | query, key, value; the gradients of the context, of key and of value | 6 s d |
# | scores and their gradients, of the q queries of a block | 2 q s |
# | a product of a block; sums on their way to key and value | q d, and d for each key but the last block's |
#
# All heads share the q x q mask. The formula is that of ``megatron.ops.causal_attention``.
# The kernel's: query, key and gradient of the context; these transposed, and so the value and the gradients of key and
# value, in rows of whole tiles; scores and their gradients of its queries.

CACHED = 2**18
"""``megatron.ops.causal_attention.CACHED``."""
QUERIES, TILE = 64, 16
"""``kQueries`` and ``kTile`` of ``megatron/ops/causal_kernel.cpp``."""


def queries_of_block(length: int) -> int:
    """Return the queries of a block, as ``megatron.ops.causal_attention`` does."""
    return min(length, 64 if length <= 512 else 128)


def heads_at_once(heads: int, length: int, threads: int = 1) -> int:
    """Return how many of ``heads``, of all samples together, are worked on together."""
    most = max(1, CACHED * threads // (queries_of_block(length) * length))
    return -(-heads // -(-heads // most))


def backward_bytes(heads: int, length: int, size: int, width: int, threads: int = 1) -> int:
    """Return the bytes of the memory in which a backward works, for heads of ``size`` numbers of ``width`` bytes.

    In fp32 they are those of the kernel.

    Args:
        heads: of all samples together, on this rank.
        threads: of this rank.
    """
    if width == 4:
        return width * min(threads, heads) * kernel_numbers(length, size)
    queries = queries_of_block(length)
    added = (length - 1) // queries * queries
    of_head = 6 * length * size + 2 * queries * length + (queries + added) * size
    return width * (heads_at_once(heads, length, threads) * of_head + queries**2)


def kernel_numbers(length: int, size: int) -> int:
    """Return the numbers that a thread of the kernel works in, in a backward."""
    row = -(-length // TILE) * TILE
    return 3 * length * size + 6 * row * size + 2 * QUERIES * row


# Bytes of what is on its way between ranks while a step runs.
#
# | message | bytes on a rank |
# |---|---|
# | sums of gradients over the replicas, ZeRO 0 and 1 | none: they are made where the gradients lie |
# | ... ZeRO 2 and 3 | two buckets, or what there is |
# | boundary of stages | one hidden state received ahead and one gradient, and one on its way out |
# | sequence parallelism | the whole input of the product that is running, and its gradient |

BUCKET_BYTES = 32 * 2**20
"""``tds.gradients.BUCKET_BYTES``."""
CUT_GRADIENTS = 2
"""The first stage of ZeRO that sums gradients within backward."""
AHEAD = 3
"""Messages of a boundary: a hidden state and a gradient ahead, and one that leaves."""


@dataclass(frozen=True)
class CommunicationBuffers:
    """What of a rank is on its way.

    Args:
        small: parameters in weights that are smaller than a bucket.
        message: bytes of the hidden state that crosses a boundary of stages; 0 without a pipeline.
        gathered: bytes of an activation that sequence parallelism gathers; 0 without.
    """

    small: int = 0
    message: int = 0
    gathered: int = 0

    def placed(self, memory: Memory, gradient: int, zero: Zero) -> Memory:
        """Return ``memory`` with its buffers; ``gradient`` bytes of a parameter."""
        steady = AHEAD * self.message + 2 * self.gathered
        if zero.replicas == 1 or zero.stage < CUT_GRADIENTS:
            return replace(memory, buffers=steady)
        return replace(memory, buffers=steady + min(self.small * gradient, 2 * BUCKET_BYTES))


# What GPUs can do at best.

PEAK_TFLOPS = {
    "H100 PCIE": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
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


def peak_flops(device_name: str) -> float | None:
    """Return the dense 16-bit FLOP/s of a GPU by its name, or None for one that the table does not know."""
    name = device_name.upper()
    parts = [part for part in PEAK_TFLOPS if all(word in name for word in part.split())]
    return PEAK_TFLOPS[max(parts, key=len)] * 1e12 if parts else None
