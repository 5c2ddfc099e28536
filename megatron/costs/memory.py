"""Training memory in bytes, and peak GPU performance. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from megatron.config.loss_chunk import UNCHUNKED, tokens_per_chunk
from megatron.costs.dimensions import ModelDimensions, known_vocab_size

# Memory for weights, gradients, optimizer states, activations and logits.
#
# With AdamW, 16-bit weights take 18 bytes per parameter, including fp32 main params, gradients and moments. In total,
# fp32 weights take 16 bytes and fp64 weights 32. SGD has no moments. Muon has one momentum for layer matrices (14
# bytes instead of 18) and AdamW's states for other weights. Adaptive Muon has a second moment per element too
# (adamuon), or one per row or column (normuon, not counted). Adafactor's means of rows and columns are small and not
# counted. An AdamW state in bf16 takes 2 bytes instead of 4, in 8 bits 1.016. With AdamW and ZeRO over d replicas:
#
# | bytes per parameter | 16 bits | fp32 |
# |---|---|---|
# | ZeRO 0 | 2 + 4 + 12 | 4 + 4 + 8 |
# | ZeRO 1 | 2 + 4 + 12 / d | 4 + 4 + 8 / d |
# | ZeRO 2 | 2 + (4 + 12) / d | 4 + (4 + 8) / d |
# | ZeRO 3 | (2 + 4 + 12) / d | (4 + 4 + 8) / d |
# | ... gathered weights: tables and the largest layer (two layers with prefetching) | 2 | 4 |
# | ... on a pipeline stage: the weights in use (``Costs.stage_gathered_parameters``) | 2 | 4 |
# | a part sharded by ZeRO, of experts with n copies (``Costs.expert_copies``) | 1 / n instead of 1 / d | |
# | CPU memory of an offloaded optimizer | 12, or 12 / d | 12, or 12 / d, with a separate copy of the weight |
# | CPU memory of offloaded weights | 2 / d | 4 / d, or none if the optimizer is offloaded too |
#
# ``CommunicationBuffers`` counts reductions in flight. The following are not counted: gradients in incomplete buckets,
# weights that ZeRO 1 and 2 gather after an update, and gradients that a step copies to the CPU. Shards consist of full
# vectors (``ParamPartition``), so some replicas hold one more row of a weight than others. Layers that are recomputed
# together are gathered together.
#
# Layer activations follow Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
# models", section 4, without scores, which a fused kernel recomputes in backward. The scratch memory of causal
# attention on a CPU (below) counts only as far as it exceeds the logits plus the memory that its layer has freed. The
# costs of T5's layers include relative biases and the probabilities of blocked attention on a CPU. For other models,
# probabilities count (5 a s / h times s b h) with attention dropout on a CPU or with --layout-independent-dropout.

EIGHT_BIT_BYTES = 1 + Fraction(4, 256)
"""Bytes per element of a state in 8 bits: a code, and a scale in fp32 for each block of 256 elements."""
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Memory:
    """Training memory on one rank, in bytes.

    ``gathered``: gathered weights (ZeRO 3 only); ``host``: offloaded data; ``buffers``: messages in transit. During
    initialization, ZeRO 3 holds only its shards and, on the host, one weight in fp32 (``optim.zero.param_init``).
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
    """ZeRO settings: stage, sharding over ``replicas``, CPU offload, and layer prefetching."""

    stage: int = 0
    replicas: int = 1
    offload_optimizer: bool = False
    offload_parameters: bool = False
    prefetches: bool = True

    @property
    def shards_weights(self) -> bool:
        """True if each replica keeps only shards of the weights."""
        return self.stage == 3 and (self.replicas > 1 or self.offload_parameters)

    @property
    def num_gathered_layers(self) -> int:
        """Maximum number of layers whose gathered weights ZeRO 3 holds at the same time."""
        return 2 if self.prefetches and self.replicas > 1 else 1

    def share(self, stage: int) -> int:
        """Return the number of shards of a tensor that is sharded from ZeRO stage ``stage`` on; 1 if it is full."""
        return self.replicas if self.stage >= stage else 1


NO_ZERO = Zero()


@dataclass(frozen=True)
class State:
    """Bytes per parameter: ``width`` (weight), ``gradient``, and ``optimizer`` (main param and optimizer states).

    With Muon, the optimizer state of layer matrices is ``saved`` bytes smaller. With adaptive Muon and bf16 moments of
    AdamW, ``saved`` is negative.
    """

    width: int
    gradient: int
    optimizer: int | Fraction
    saved: int | Fraction = 0

    @classmethod
    def for_optimizer(cls, dtype: str, optimizer: str, num_bf16_states: int = 0, num_8bit_states: int = 0) -> State:
        """Choose the bytes per parameter.

        Args:
            optimizer: ``OptimizerConfig.state_type``.
            num_bf16_states: how many of AdamW's two states are stored in bf16.
            num_8bit_states: how many of them are stored in 8 bits. The formula includes the states of small
                parameters, which are stored in fp32.
        """
        width = BYTES[dtype]
        wide = max(width, 4)
        main_param = wide if width < 4 else 0
        num_wide = 2 - num_bf16_states - num_8bit_states
        moments: int | Fraction = num_wide * wide + num_bf16_states * BYTES["bf16"]
        if num_8bit_states:
            moments += num_8bit_states * EIGHT_BIT_BYTES
        if optimizer == "adamuon":
            return cls(width, wide, main_param + moments, moments - 2 * wide)
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
        distributed_matrices: int = 0,
        copies: int = 1,
    ) -> Memory:
        """Compute a rank's memory for ``parameters`` parameters, ``gathered`` of them gathered at the same time.

        Args:
            matrices: parameters in layer matrices.
            num_distributed: parameters in experts with ``copies`` copies, over which ZeRO shards them.
            distributed_matrices: parameters in matrices of these experts.
        """
        wide, is_sharded = max(self.width, 4), zero.stage == 3

        def shard_bytes(width: int | Fraction, stage: int, saved: int | Fraction = 0) -> int:
            """Return this rank's bytes of a part with ``width`` bytes per parameter, sharded from ``stage`` on.

            Args:
                saved: bytes by which ``width`` is smaller in layer matrices.
            """
            share = zero.share(stage)
            dense = (parameters - num_distributed) * width - (matrices - distributed_matrices) * saved
            distributed = num_distributed * width - distributed_matrices * saved
            return -(-dense // share) + -(-distributed // (copies if share > 1 else 1))

        weights, gradients = shard_bytes(self.width, 3), shard_bytes(self.gradient, 2)
        optimizer = self.optimizer
        if self.width == wide and zero.offload_optimizer != zero.offload_parameters:
            optimizer += wide  # on different devices, the weight cannot be its own main param
        states = shard_bytes(optimizer, 1, self.saved)
        is_gathered = is_sharded and (zero.replicas > 1 or zero.offload_parameters)
        on_host = (states if zero.offload_optimizer else 0) + (weights if zero.offload_parameters else 0)
        return Memory(
            weights=0 if zero.offload_parameters else weights,
            gradients=gradients,
            optimizer=0 if zero.offload_optimizer else states,
            activations=activations,
            logits=logits,
            gathered=gathered * self.width if is_gathered else 0,
            host=on_host,
        )


# Inputs that recompute saves until backward, one per group of recomputed layers, and where they are stored.


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that a unit saves for one micro-batch's backward: ``full``, or ``input`` if the unit is recomputed.

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
    """Storage for recomputed layers' inputs: one per ``every`` layers, in ``parts`` shards, on device or host."""

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
        """Return ``memory`` with a stage's activations, if its layers are recomputed.

        Args:
            units_by_chunk: saved bytes per unit in each chunk of the stage.
            forwards: forwards in flight, each through all chunks.
            shared_bytes: bytes per forward in tensors that several layers read, saved unsharded on the device.
            work: scratch bytes in a recomputed layer's backward.
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
    """Choose the storage for recomputed layers' inputs from a ``megatron.config.Config``."""
    parallel = config.parallel
    parts = parallel.model_parallel_size if parallel.partition_activations else 1
    return SavedActivations(parallel.checkpoint_num_layers, parts, parallel.checkpoint_in_cpu)


# Head and loss memory on the last stage.
#
# | logits | softmax by | during the computation | saved by each micro-batch in flight |
# |---|---|---|---|
# | not chunked | torch | logits in the dtype of the weights; in 16 bits also an fp32 copy | the fp32 softmax |
# | not chunked | Triton | the gradient of the logits in their dtype | the logits |
# | chunked | torch | one fp32 chunk, two with several tensor ranks, twice as many with a soft-cap | two gradients |
# | chunked | Triton | one fp32 chunk, two with several tensor ranks | two gradients |
#
# The two gradients are the hidden states' gradient and the table's fp32 gradient. In 16 bits, chunks also
# need copies: one of the logits' gradient of a chunk and one of the table's gradient. On a CPU both exist at the same
# time. On other devices, matrix products add to the fp32 gradient of the table, and its copy is made in backward, when
# the chunk has been freed. ``megatron.config.loss_chunk.tokens_per_chunk`` determines if logits are chunked.
#
# Not counted: the table copy that aligns the logit rows on GPUs, if a rank's word count is not
# divisible by 8.


def loss_bytes(
    model: ModelDimensions,
    tokens: int,
    tensor: int,
    width: int,
    *,
    forwards: int = 1,
    is_on_cpu: bool = False,
    has_cap: bool = False,
    has_kernels: bool = False,
) -> int:
    """Compute the logit and loss bytes for ``tokens`` tokens on one of ``tensor`` ranks.

    Args:
        tokens: tokens per micro-batch.
        width: bytes per weight element.
        forwards: micro-batches in flight.
        has_cap: logits are soft-capped, which saves one more value per logit. If the loss is chunked, only the logits
            of the current chunk count, and with ``has_kernels`` no further value is saved.
        has_kernels: Triton kernels compute the softmax, except in fp64.
    """
    vocab_shard, wide, h = -(-known_vocab_size(model) // tensor), max(width, 4), model.hidden_size
    chunk_tokens = tokens_per_chunk(model.loss_chunk_tokens, tokens, known_vocab_size(model), h, is_on_cpu=is_on_cpu)
    has_kernels = has_kernels and width < BYTES["fp64"]
    if chunk_tokens == UNCHUNKED:
        softmax, wide_copy = (width, 0) if has_kernels else (wide, wide if width < wide else 0)
        saved = softmax + (width if has_cap else 0)
        return tokens * vocab_shard * (width + wide_copy + saved * forwards)
    copies = width if width < wide else 0
    num_buffers = (2 if tensor > 1 else 1) * (2 if has_cap and not has_kernels else 1)
    chunk_bytes, table_copy = chunk_tokens * (wide * num_buffers + copies), h * copies  # per word
    transient_bytes = chunk_bytes + table_copy if is_on_cpu else max(chunk_bytes, table_copy)
    return vocab_shard * transient_bytes + forwards * h * (tokens * width + vocab_shard * wide)


# Scratch memory of causal attention on a CPU, for one layer at a time.
#
# In fp32, ``megatron/ops/causal_kernel.cpp`` computes one head per thread at a time. In fp64, or if the kernel cannot
# be built, attention is computed block by block:
#
# | elements for each head processed at the same time | number |
# |---|---|
# | query, key, value, and the gradients of context, key and value | 6 s d |
# | scores of the q queries of a block, and their gradients | 2 q s |
# | a product of a block | q d |
# | a product to add to the gradient of key or value | d per key before the last block |
#
# All heads share the q x q mask. The formula matches ``megatron.ops.causal_attention``. Each thread of the kernel
# allocates memory for
#
# * the query, the key and the gradient of the context,
# * the transposes of query, key and value and of the gradients of context, key and value, in rows of full tiles,
# * the scores of a block of queries, and their gradients.

CACHED_SCORES = 2**18
"""Must equal ``megatron.ops.causal_attention.CACHED_SCORES``."""
KERNEL_QUERIES, KERNEL_TILE = 64, 16
"""Must equal ``kQueries`` and ``kTile`` of ``megatron/ops/causal_kernel.cpp``."""


def queries_per_block(length: int) -> int:
    """Choose the queries per block; must equal ``megatron.ops.causal_attention.queries_per_block``."""
    return min(length, 64 if length <= 512 else 128)


def heads_per_group(heads: int, length: int, threads: int = 1) -> int:
    """Choose the heads processed at the same time, out of ``heads`` heads over all samples."""
    max_heads = max(1, CACHED_SCORES * threads // (queries_per_block(length) * length))
    return -(-heads // -(-heads // max_heads))


def backward_bytes(heads: int, length: int, size: int, width: int, threads: int = 1) -> int:
    """Compute attention's scratch bytes in backward on a CPU: with the C++ kernel in fp32, otherwise block by block.

    Args:
        heads: heads on this rank, over all samples.
        length: tokens per sample.
        size: elements per head and token.
        width: bytes per element.
        threads: threads on this rank.
    """
    if width == 4:
        return width * min(threads, heads) * kernel_scratch_numel(length, size)
    queries = queries_per_block(length)
    added = (length - 1) // queries * queries
    numel_per_head = 6 * length * size + 2 * queries * length + (queries + added) * size
    return width * (heads_per_group(heads, length, threads) * numel_per_head + queries**2)


def kernel_scratch_numel(length: int, size: int) -> int:
    """Count the scratch elements per thread in the kernel's backward."""
    row_length = -(-length // KERNEL_TILE) * KERNEL_TILE
    return 3 * length * size + 6 * row_length * size + 2 * KERNEL_QUERIES * row_length


# Communication buffers during a step.
#
# | message | bytes on a rank |
# |---|---|
# | reductions of gradients over the replicas, ZeRO 0 and 1 | none: they run in place |
# | ... ZeRO 2 and 3 | two buckets, or all gradients if they are smaller |
# | boundary between stages | a hidden state and a gradient received in advance, and one message being sent |
# | sequence parallelism | the gathered input of the current product, and its gradient |

BUCKET_BYTES = 32 * 2**20
"""Must equal ``tds.gradients.BUCKET_BYTES``."""
GRADIENT_SHARDING_STAGE = 2
"""Lowest ZeRO stage that reduces gradients during backward."""
MESSAGES_PER_BOUNDARY = 3
"""Messages at a stage boundary: a hidden state and a gradient received in advance, and one being sent."""


@dataclass(frozen=True)
class CommunicationBuffers:
    """A rank's communication buffers.

    Args:
        small: parameters in weights that are smaller than a gradient bucket.
        message: hidden state bytes sent between stages; 0 without a pipeline.
        gathered: bytes in an activation that sequence parallelism gathers; 0 without sequence parallelism.
    """

    small: int = 0
    message: int = 0
    gathered: int = 0

    def apply_to(self, memory: Memory, gradient: int, zero: Zero) -> Memory:
        """Return ``memory`` including these buffers; ``gradient``: gradient bytes per parameter."""
        steady = MESSAGES_PER_BOUNDARY * self.message + 2 * self.gathered
        if zero.replicas == 1 or zero.stage < GRADIENT_SHARDING_STAGE:
            return replace(memory, buffers=steady)
        return replace(memory, buffers=steady + min(self.small * gradient, 2 * BUCKET_BYTES))


# Peak GPU performance.

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
"""Peak dense 16-bit TFLOP/s (bf16; fp16 on V100) by device name.

A key matches if the device name contains all of its words; the longest matching key applies.
"""


FP8_GPUS = frozenset(PEAK_TFLOPS) - {"A100", "V100", "MI300X"}
"""GPUs with products of e4m3 in ``torch._scaled_mm``. An MI300X has another FP8 format."""
GROUPED_FP8_GPUS = FP8_GPUS - {"B200", "L40S"}
"""GPUs with a kernel of ``torch._scaled_grouped_mm``, which products of experts use: compute capability 9.x."""
FP8_PEAK_RATIO = 2.0
"""Peak FLOP/s in FP8 over peak FLOP/s in 16 bits."""
FP8_RATE_RATIO = 1.6
"""Rate of products in FP8 over the rate in bf16, if ``--calibrate`` has not measured it.

The peaks have a ratio of 2, and kernels with a scale per row reach a smaller share of their peak. This is an
assumption: no product was measured on a GPU.
"""


def peak_flops(device_name: str, fp8_share: float = 0.0) -> float | None:
    """Look up a GPU's peak dense 16-bit FLOP/s by name; None if it is not in ``PEAK_TFLOPS``.

    Args:
        fp8_share: share of the FLOPs in FP8. The result is then the rate at which the peaks of both formats compute
            the two shares one after the other. On a GPU without FP8, the peak of 16 bits remains.
    """
    key = _gpu_key(device_name)
    if key is None:
        return None
    peak = PEAK_TFLOPS[key] * 1e12
    return mixed_peak(peak, fp8_share) if key in FP8_GPUS else peak


def mixed_peak(peak: float, fp8_share: float) -> float:
    """Return the peak FLOP/s if ``fp8_share`` of the FLOPs are in FP8, given the peak of 16 bits."""
    return peak / (1 - fp8_share + fp8_share / FP8_PEAK_RATIO)


def has_fp8(device_name: str) -> bool:
    """Return True if the GPU is known to have products in FP8."""
    return _gpu_key(device_name) in FP8_GPUS


def lacks_grouped_fp8(device_name: str) -> bool:
    """Return True if the GPU is known to have no grouped products in FP8, which experts need."""
    key = _gpu_key(device_name)
    return key is not None and key not in GROUPED_FP8_GPUS


def _gpu_key(device_name: str) -> str | None:
    name = device_name.upper()
    keys = [key for key in PEAK_TFLOPS if all(word in name for word in key.split())]
    return max(keys, key=len, default=None)
