"""Context parallelism of recurrent layers: exchange of the states between the chunks of a sequence.

Attention balances causal work with 2c chunks: rank r of c has the chunks r and 2c-1-r (``megatron.mpu.context_parallel``).
A recurrent layer keeps this distribution and needs, for each of its two chunks, the state after the previous chunk. The
final state of a chunk is affine in its initial state, so that no rank waits for the scan of another rank:

1. ``split_chunks``: the two chunks become samples of a batch of twice the size.
2. ``left_tokens``: all-gather of the last k - 1 inputs of the convolution of each chunk.
3. Each rank computes the transition of its chunks, and their final states from zero.
4. ``prefix_states``: all-gather of both; each rank combines the chunks before its own, in the order of the sequence.
5. The recurrence runs with these initial states.

Backward reduce-scatters the gradients of steps 2 and 4. Values and gradients are exact. A document that starts within a
chunk makes the chunk's transition zero, and later chunks continue the last document of the chunk.

An all-to-all to contiguous chunks before and after the recurrent layer would need the states of one chunk per rank instead
of two, but would send 2 b h s / c elements of activations. The states of the second chunk are (c - 1) b a d_k (d_k + d_v)
elements, independent of the sequence length. With the sizes of Qwen3-Next (a = 32, d_k = d_v = 128, h = 2048, states in
fp32, activations in bf16), the states take fewer bytes than the activations if a rank has s / c > 512 (c - 1) tokens. The
layout of tokens also remains the same in all layers.

Source: Sun et al. 2024, "Linear attention sequence parallelism" (LASP), extended to transitions that are matrices.
"""  # noqa: E501

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.mpu.context_parallel import gather_from_context_region, token_ranges
from megatron.mpu.groups import Group
from megatron.mpu.topology import chunk_indices


def split_chunks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's chunks of ``x`` as samples, chunk by chunk.

    Shapes:
        x      [s/c, b, ...], this rank's m chunks: 2 with context parallelism, otherwise 1
        output [m b, s/cm, ...]
    """
    return x.unflatten(0, (_num_chunks(group), -1)).transpose(1, 2).flatten(0, 1)


def join_chunks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the tokens [s/c, b, ...] of chunks [m b, s/cm, ...]: the inverse of ``split_chunks``."""
    return x.unflatten(0, (_num_chunks(group), -1)).transpose(1, 2).flatten(0, 1)


def chunk_starts(starts: torch.Tensor | None, length: int, group: Group) -> torch.Tensor | None:
    """Return the document starts of this rank's tokens, relative to the first token of their chunk.

    Shapes:
        starts int32 [b, s], document starts of the full sequence; None: one document
        output int32 [m b, s/cm], negative if the document starts before the chunk

    Args:
        length: number of this rank's tokens, s/c.
    """
    if starts is None:
        return None
    chunks = [
        starts[:, token_range.first_position : token_range.first_position + token_range.stop - token_range.start]
        - token_range.first_position
        for token_range in token_ranges(length, group)
    ]
    return torch.cat(chunks)


def left_tokens(x: torch.Tensor, num_tokens: int, group: Group) -> torch.Tensor | None:
    """Return the tokens before each of this rank's chunks; zeros before the sequence. Collective, also in backward.

    Returns None without context parallelism.

    Shapes:
        x      [m b, n, channels]
        output [m b, num_tokens, channels]
    """
    if group.size == 1 or num_tokens == 0:
        return None
    num_sent = min(num_tokens, x.shape[1])  # a chunk may be shorter than the convolution
    tails = x[:, x.shape[1] - num_sent :].unflatten(0, (2, -1))  # [2, b, num_sent, channels]
    gathered = gather_from_context_region(tails, group)  # [2c, b, num_sent, channels]
    tokens = F.pad(gathered.transpose(0, 1).flatten(1, 2), (0, 0, num_tokens, 0))
    return torch.cat(
        [tokens[:, idx * num_sent : idx * num_sent + num_tokens] for idx in chunk_indices(group.rank, group.size)]
    )


def prefix_states(transition: torch.Tensor, state: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the initial state of each of this rank's chunks; zeros without context parallelism.

    The final state of a chunk is ``transition @ initial + state``. Collective, also in backward.

    Shapes:
        transition [m b, a, d_k, d_k]; or [m b, a, 1, 1] if the state is multiplied by a number per head
        state      [m b, a, d_k, d_v], the final state of a chunk whose initial state is zero
        output     as state
    """
    if group.size == 1:
        return torch.zeros_like(state)
    packed = torch.cat((transition.flatten(1), state.flatten(1)), dim=1).unflatten(0, (2, -1))
    sizes = [transition[0].numel(), state[0].numel()]
    transitions, finals = gather_from_context_region(packed, group).split(sizes, dim=2)
    batch = len(state) // 2
    transitions = transitions.unflatten(2, transition.shape[1:])  # [2c, b, a, d_k, d_k]
    finals = finals.unflatten(2, state.shape[1:])  # [2c, b, a, d_k, d_v]
    is_matrix = transition.shape[-1] == state.shape[-2]
    initial_states = [state.new_zeros(batch, *state.shape[1:])]
    early_idx, late_idx = chunk_indices(group.rank, group.size)
    for chunk_transition, final in zip(transitions.unbind()[:late_idx], finals.unbind()[:late_idx], strict=True):
        before = initial_states[-1]
        initial_states.append((chunk_transition @ before if is_matrix else chunk_transition * before) + final)
    return torch.cat((initial_states[early_idx], initial_states[late_idx]))


def _num_chunks(group: Group) -> int:
    return 1 if group.size == 1 else 2
