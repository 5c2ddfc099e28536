"""Memory of training in bytes, and the peak performance of GPUs. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.config.loss_chunk import UNCHUNKED, tokens_per_chunk
from megatron.costs.dimensions import ModelDimensions, known_vocab_size

# Bytes that training holds: weights, gradients, optimizer states, activations and logits.
#
# 16-bit weights have fp32 main params, gradients and moments: 18 bytes per parameter with AdamW. fp32 weights have 16
# bytes in total, fp64 weights 32. SGD has no moments. Muon has a momentum for matrices of layers instead of AdamW's two
# moments (14 bytes, not 18), and AdamW's states for other weights. Adafactor's means of rows and columns are small and
# not counted. An AdamW state in bf16 has 2 bytes, not 4. With AdamW and ZeRO over d replicas:
#
# | bytes per parameter | 16 bits | fp32 |
# |---|---|---|
# | ZeRO 0 | 2 + 4 + 12 | 4 + 4 + 8 |
# | ZeRO 1 | 2 + 4 + 12 / d | 4 + 4 + 8 / d |
# | ZeRO 2 | 2 + (4 + 12) / d | 4 + (4 + 8) / d |
# | ZeRO 3 | (2 + 4 + 12) / d | (4 + 4 + 8) / d |
# | ... also for gathered weights: tables and the largest layer, twice with prefetching | 2 | 4 |
# | ... of experts distributed over e of the d replicas, ZeRO 1 | 2 + 4 + 12 e / d | 4 + 4 + 8 e / d |
# | offload of the optimizer, on the CPU | 12, or 12 / d | 12, or 12 / d, with a separate copy of the weight |
# | offload of the weights, on the CPU | 2 / d | 4 / d, or none if the optimizer is offloaded too |
#
# ``CommunicationBuffers`` counts reductions in flight. Not counted are gradients in incomplete buckets, weights that
# ZeRO 1 and 2 gather after an update, and gradients that a step copies to the CPU. Shards consist of full vectors
# (``ParamPartition``), so that some replicas hold an additional row of a weight. A recomputed run of several layers is
# gathered as a whole.
#
# Source of the activations of layers: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
# models", section 4, without scores, which a fused kernel recomputes in backward. The scratch memory of causal
# attention on a CPU (below) counts only where it exceeds the sum of the logits and the memory that its layer has freed.
# T5's relative biases and the probabilities of its blocked attention on a CPU are counted with T5's layers. With
# attention dropout on a CPU, or with --layout-independent-dropout, probabilities count too (5 a s / h times s b h),
# except T5's.

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Memory:
    """Bytes that training holds on one rank.

    ``gathered``: gathered weights (ZeRO 3 only); ``host``: offloaded data; ``buffers``: messages in transit. At the
    start ZeRO 3 holds no more than its shards and, on the host, one weight in fp32 (``optim.zero.param_init``).
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
        """Bytes on the device: everything except ``host``."""
        states = self.weights + self.gathered + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.buffers


@dataclass(frozen=True)
class Zero:
    """Sharding of state over ``replicas``, offload to the CPU, and prefetching of layers."""

    stage: int = 0
    replicas: int = 1
    offload_optimizer: bool = False
    offload_parameters: bool = False
    prefetches: bool = True

    @property
    def num_gathered_layers(self) -> int:
        """Maximum number of layers whose gathered weights ZeRO 3 holds at the same time."""
        return 2 if self.prefetches and self.replicas > 1 else 1

    def share(self, stage: int) -> int:
        """Return the number of shards of a state that is sharded from ZeRO stage ``stage`` on; 1: it is not sharded."""
        return self.replicas if self.stage >= stage else 1


NO_ZERO = Zero()


@dataclass(frozen=True)
class State:
    """Bytes per parameter: ``width`` of the weight, ``gradient``, and ``optimizer`` for main param and states.

    With Muon, the optimizer state of matrices of layers is smaller by ``saved`` bytes.
    """

    width: int
    gradient: int
    optimizer: int
    saved: int = 0

    @classmethod
    def for_optimizer(cls, dtype: str, optimizer: str, num_bf16_states: int = 0) -> State:
        """Return the bytes per parameter.

        Args:
            optimizer: ``OptimizerConfig.state_type``.
            num_bf16_states: number of AdamW's two states that are in bf16.
        """
        width = BYTES[dtype]
        wide = max(width, 4)
        main_param = wide if width < 4 else 0
        moments = (2 - num_bf16_states) * wide + num_bf16_states * BYTES["bf16"]
        states = {"adamw": moments, "muon": moments, "momentum": wide}.get(optimizer, 0)
        return cls(width, wide, main_param + states, states - wide if optimizer == "muon" else 0)

    def memory(
        self,
        parameters: int,
        activations: int,
        logits: int,
        zero: Zero = NO_ZERO,
        gathered: int = 0,
        matrices: int = 0,
        num_distributed: int = 0,
        ranks: int = 1,
    ) -> Memory:
        """Return the memory of a rank with ``parameters`` parameters, of which ``gathered`` are gathered at a time.

        Args:
            matrices: number of parameters in matrices of layers.
            num_distributed: number of parameters of experts, which are distributed over ``ranks`` ranks and replicated
                on ``replicas / ranks``.
        """
        wide, is_sharded = max(self.width, 4), zero.stage == 3
        weights = -(-parameters * self.width // zero.share(3))
        optimizer = self.optimizer
        if self.width == wide and zero.offload_optimizer != zero.offload_parameters:
            optimizer += wide  # the main param cannot be the weight itself
        share = zero.share(1)
        states = -(-((parameters - num_distributed) * optimizer - matrices * self.saved) // share)
        states += -(-num_distributed * optimizer * ranks // max(share, ranks))
        is_gathered = is_sharded and (zero.replicas > 1 or zero.offload_parameters)
        on_host = (states if zero.offload_optimizer else 0) + (weights if zero.offload_parameters else 0)
        return Memory(
            weights=0 if zero.offload_parameters else weights,
            gradients=-(-parameters * self.gradient // zero.share(2)),
            optimizer=0 if zero.offload_optimizer else states,
            activations=activations,
            logits=logits,
            gathered=gathered * self.width if is_gathered else 0,
            host=on_host,
        )


# Inputs of runs of layers that recompute saves, and where they are stored until backward.


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that a unit saves for backward of one micro-batch: ``full``, or ``input`` if the unit is recomputed.

    ``core`` is the part of ``full`` that selective recompute does not save.
    """

    full: int = 0
    input: int = 0
    core: int = 0

    def without_core(self) -> SavedBytes:
        """Return the bytes saved with selective recompute."""
        return replace(self, full=self.full - self.core, core=0)


@dataclass(frozen=True)
class SavedActivations:
    """Storage of one input per ``every`` layers, sharded over ``parts`` tensor ranks, on the device or on the host."""

    every: int = 1
    parts: int = 1
    is_on_host: bool = False

    def apply_to(
        self,
        memory: Memory,
        units_by_chunk: Sequence[Sequence[SavedBytes]],
        forwards: float,
        shared_bytes: int,
        work: int = 0,
    ) -> Memory:
        """Return ``memory`` with the activations of a stage whose layers are recomputed.

        Args:
            units_by_chunk: saved bytes of each unit, for each chunk of the stage.
            forwards: number of forwards through all chunks that are in flight.
            shared_bytes: bytes per forward of tensors that several layers read; they are saved in full on the device.
            work: scratch bytes of the backward of a recomputed layer.
        """
        inputs = sum(
            sum([unit.input for unit in chunk_units if unit.input][:: self.every]) for chunk_units in units_by_chunk
        )
        saved_inputs = -(-int(forwards * inputs) // self.parts)
        not_recomputed = sum(unit.full for chunk_units in units_by_chunk for unit in chunk_units if not unit.input)
        recomputed = max(
            sum(sorted((unit.full for unit in chunk_units if unit.input), reverse=True)[: self.every])
            for chunk_units in units_by_chunk
        )
        transient_bytes = max(recomputed + work - memory.logits, 0)  # the logits are freed before a layer is recomputed
        on_device, on_host = (0, saved_inputs) if self.is_on_host else (saved_inputs, 0)
        saved = int(forwards * (shared_bytes + not_recomputed)) + on_device
        return replace(memory, activations=saved + transient_bytes, host=memory.host + on_host)


def saved_activations_of(config: Any) -> SavedActivations:
    """Return the storage of the inputs of recomputed layers for ``config``, a ``megatron.config.Config``."""
    parallel = config.parallel
    parts = parallel.model_parallel_size if parallel.partition_activations else 1
    return SavedActivations(parallel.checkpoint_num_layers, parts, parallel.checkpoint_in_cpu)


# Bytes of the head and the loss on the last stage, saved for backward and during their computation.
#
# | logits | during the computation | saved by each micro-batch in flight |
# |---|---|---|
# | together | in the dtype of the weights; in 16 bits also an fp32 copy | their fp32 softmax |
# | in chunks | one chunk in fp32, two with several tensor ranks; in 16 bits also copies | two gradients |
#
# The two gradients belong to the hidden states and, in fp32, to the table. With 16-bit weights a chunk and the table's
# gradient are copied. ``megatron.config.loss_chunk.tokens_per_chunk`` chooses between the two rows.


def loss_bytes(
    model: ModelDimensions,
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
        tokens: tokens of a micro-batch.
        width: bytes per element of a weight.
        forwards: number of micro-batches that wait for their backward.
        has_cap: logits are soft-capped, which saves one more value per logit. With chunks, only the logits of the
            current chunk count.
    """
    vocab_shard, wide, h = -(-known_vocab_size(model) // tensor), max(width, 4), model.hidden_size
    chunk_tokens = tokens_per_chunk(model.loss_chunk_tokens, tokens, known_vocab_size(model), h, is_on_cpu=is_on_cpu)
    if chunk_tokens == UNCHUNKED:
        saved = wide + (width if has_cap else 0)
        return tokens * vocab_shard * (width + (wide if width < wide else 0) + saved * forwards)
    copies = width if width < wide else 0
    num_buffers = (2 if tensor > 1 else 1) * (2 if has_cap else 1)
    transient_bytes = vocab_shard * (chunk_tokens * (wide * num_buffers + copies) + h * copies)
    return transient_bytes + forwards * h * (tokens * width + vocab_shard * wide)


# Scratch memory of causal attention on a CPU, for one layer at a time.
#
# In fp32 ``megatron/ops/causal_kernel.cpp`` computes one head per thread at a time. In fp64, and if the kernel could
# not be built, attention works block by block:
#
# | elements, for each of the n heads that are processed together | number |
# |---|---|
# | query, key, value; the gradients of the context, of key and of value | 6 s d |
# | scores and their gradients, for the q queries of a block | 2 q s |
# | a product of a block | q d |
# | a product that is added to the gradient of key or value | d per key before the last block |
#
# All heads share the q x q mask. The formula is that of ``megatron.ops.causal_attention``. The kernel's memory consists
# of query, key and gradient of the context; the transposes of these three, of the value and of the gradients of key and
# value, in rows of full tiles; and the scores of a block of queries and their gradients.

CACHED_SCORES = 2**18
"""``megatron.ops.causal_attention.CACHED_SCORES``."""
KERNEL_QUERIES, KERNEL_TILE = 64, 16
"""``kQueries`` and ``kTile`` of ``megatron/ops/causal_kernel.cpp``."""


def queries_per_block(length: int) -> int:
    """Return the number of queries per block; must equal ``megatron.ops.causal_attention.queries_per_block``."""
    return min(length, 64 if length <= 512 else 128)


def heads_per_group(heads: int, length: int, threads: int = 1) -> int:
    """Return the number of heads that are processed together, out of ``heads`` over all samples."""
    max_heads = max(1, CACHED_SCORES * threads // (queries_per_block(length) * length))
    return -(-heads // -(-heads // max_heads))


def backward_bytes(heads: int, length: int, size: int, width: int, threads: int = 1) -> int:
    """Return the scratch bytes of attention's backward on a CPU: with the C++ kernel in fp32, otherwise block by block.

    Args:
        heads: number of heads on this rank, over all samples.
        length: number of tokens of a sample.
        size: elements of a head per token.
        width: bytes per element.
        threads: number of threads of this rank.
    """
    if width == 4:
        return width * min(threads, heads) * kernel_scratch_numel(length, size)
    queries = queries_per_block(length)
    added = (length - 1) // queries * queries
    numel_per_head = 6 * length * size + 2 * queries * length + (queries + added) * size
    return width * (heads_per_group(heads, length, threads) * numel_per_head + queries**2)


def kernel_scratch_numel(length: int, size: int) -> int:
    """Return the number of elements of scratch memory per thread in the kernel's backward."""
    row_length = -(-length // KERNEL_TILE) * KERNEL_TILE
    return 3 * length * size + 6 * row_length * size + 2 * KERNEL_QUERIES * row_length


# Buffers of messages between ranks during a step.
#
# | message | bytes on a rank |
# |---|---|
# | reductions of gradients over the replicas, ZeRO 0 and 1 | none: they are in place |
# | ... ZeRO 2 and 3 | two buckets, or all gradients if there are fewer |
# | boundary between stages | a hidden state and a gradient received early, and one being sent |
# | sequence parallelism | the gathered input of the current product, and its gradient |

BUCKET_BYTES = 32 * 2**20
"""``tds.gradients.BUCKET_BYTES``."""
GRADIENT_SHARDING_STAGE = 2
"""First stage of ZeRO that reduces gradients during backward."""
MESSAGES_PER_BOUNDARY = 3
"""Messages at a boundary: a hidden state and a gradient received early, and one being sent."""


@dataclass(frozen=True)
class CommunicationBuffers:
    """Buffers of a rank's messages.

    Args:
        small: number of parameters in weights that are smaller than a bucket.
        message: bytes of the hidden state that is sent between stages; 0 without a pipeline.
        gathered: bytes of an activation that sequence parallelism gathers; 0 without sequence parallelism.
    """

    small: int = 0
    message: int = 0
    gathered: int = 0

    def apply_to(self, memory: Memory, gradient: int, zero: Zero) -> Memory:
        """Return ``memory`` with its buffers; ``gradient``: bytes of a gradient per parameter."""
        steady = MESSAGES_PER_BOUNDARY * self.message + 2 * self.gathered
        if zero.replicas == 1 or zero.stage < GRADIENT_SHARDING_STAGE:
            return replace(memory, buffers=steady)
        return replace(memory, buffers=steady + min(self.small * gradient, 2 * BUCKET_BYTES))


# Peak performance of GPUs.

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
"""Dense 16-bit peaks (bf16; fp16 on V100) by words of the device's name; the longest matching key applies."""


def peak_flops(device_name: str) -> float | None:
    """Return the dense 16-bit FLOP/s of a GPU by its name; None for a GPU that is not in the table."""
    name = device_name.upper()
    keys = [key for key in PEAK_TFLOPS if all(word in name for word in key.split())]
    return PEAK_TFLOPS[max(keys, key=len)] * 1e12 if keys else None
