"""The state space recurrence of Mamba-2, computed in chunks (state space duality).

For each head, with a state S [d, n] that starts at ``initial_state``:

    S_i = decay_i S_(i-1) + x_i b_i^T        decay_i = exp(log_decay_i), or 0 at the start of a document
    y_i = S_i c_i

A sequence is divided into chunks of l tokens. Within a chunk, y = ((C B^T) * decays) X is a masked product, as in
attention. Element (i, j) of ``decays`` is the product of the decays of tokens j + 1 ... i. Between chunks, only the
states are carried over, so computation and memory grow linearly with the length.

Tokens of other documents are masked before the exponential: exp(-inf) is 0 and has the gradient 0, so that neither
values nor gradients depend on other documents.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK_SIZE = 64
"""Default number of tokens per chunk."""


def state_space_scan(
    x: torch.Tensor, log_decay: torch.Tensor, b_t: torch.Tensor, c_t: torch.Tensor, *,
    starts: torch.Tensor | None = None, initial_state: torch.Tensor | None = None, chunk_size: int = CHUNK_SIZE,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the outputs y_i and the state after the last token.

    Decays and states are computed in fp32, or in fp64 for fp64 inputs.

    Shapes:
        x             [b, s, a, d], multiplied by the time step
        log_decay     [b, s, a], at most 0
        b_t, c_t      [b, s, g, n], each shared by a/g neighbouring heads
        starts        int32 [b, s], the index in ``x`` of the first token of each token's document; negative if the
                      document started before ``x``. None: all tokens continue the document of ``initial_state``
        initial_state [b, a, d, n]; None: zeros
        output        [b, s, a, d] in the dtype of ``x``; [b, a, d, n] in the dtype of the states

    Source: Dao and Gu 2024, "Transformers are SSMs: generalized models and efficient algorithms through structured
    state space duality", section 6.
    """
    return ChunkedStateSpace(x, log_decay, b_t, c_t, starts=starts, chunk_size=chunk_size)(initial_state)


class ChunkedStateSpace:
    """The recurrence of a sequence, prepared for any initial state.

    Shapes and arguments: as in ``state_space_scan``. Tensors of c chunks have the shape [b, c, g, a/g, l, ...].
    """

    def __init__(
        self, x: torch.Tensor, log_decay: torch.Tensor, b_t: torch.Tensor, c_t: torch.Tensor, *,
        starts: torch.Tensor | None = None, chunk_size: int = CHUNK_SIZE,
    ) -> None:  # fmt: skip
        dtype = torch.promote_types(x.dtype, torch.float32)
        self._dtype, self._length, num_groups = x.dtype, x.shape[1], b_t.shape[2]
        size = min(chunk_size, self._length)
        values = _split_chunks(x.to(dtype), size).unflatten(3, (num_groups, -1)).permute(0, 1, 3, 4, 2, 5)
        inputs, readouts = (_split_chunks(y.to(dtype), size).transpose(2, 3) for y in (b_t, c_t))  # [b, c, g, l, n]
        steps = _split_chunks(log_decay.to(dtype).unsqueeze(-1), size).squeeze(-1)  # [b, c, l, a]
        steps = steps.unflatten(3, (num_groups, -1)).permute(0, 1, 3, 4, 2)  # [b, c, g, a/g, l]
        totals = steps.cumsum(-1)
        is_visible, is_continued = _document_masks(starts, self._length, size, x.device)
        decays = sums_between(steps).masked_fill(~is_visible[:, :, None, None], -torch.inf).exp()
        self._carried = totals.masked_fill(~is_continued[:, :, None, None], -torch.inf).exp()  # [b, c, g, a/g, l]
        scores = (readouts @ inputs.transpose(-1, -2)).unsqueeze(3)  # [b, c, g, 1, l, l]
        self._output = (scores * decays) @ values  # [b, c, g, a/g, l, d]
        self._updates = (values * decays[..., -1, :].unsqueeze(-1)).transpose(-1, -2) @ inputs.unsqueeze(3)
        self._readouts = readouts.unsqueeze(3)  # [b, c, g, 1, l, n]
        self._log_transition = totals[..., -1].sum(1).flatten(1, 2)  # [b, a]
        if starts is not None:
            self._log_transition = self._log_transition.masked_fill(starts[:, -1:] >= 0, -torch.inf)

    def __call__(self, initial_state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs and the last state."""
        *first_states, state = self._states(initial_state)
        carried_output = self._readouts @ torch.stack(first_states, dim=1).transpose(-1, -2)
        output = self._output + carried_output * self._carried.unsqueeze(-1)
        output = output.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)  # [b, c l, a, d]
        return output[:, : self._length].to(self._dtype), state.flatten(1, 2)

    def transition_and_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the decay from the initial to the last state, [b, a], and the last state from zero, [b, a, d, n].

        The decay is 0 in rows in which a document starts.
        """
        return self._log_transition.exp(), self._states(None)[-1].flatten(1, 2)

    def _states(self, initial_state: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the states [b, g, a/g, d, n] before each chunk and after the last one."""
        states = [torch.zeros_like(self._updates[:, 0])]
        if initial_state is not None:
            states = [initial_state.to(self._updates.dtype).view_as(self._updates[:, 0])]
        for update, transition in zip(self._updates.unbind(1), self._carried[..., -1].unbind(1), strict=True):
            states.append(states[-1] * transition[..., None, None] + update)
        return states


def _split_chunks(x: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Return ``x`` [b, s, n, m], padded with zeros to full chunks, as [b, c, l, n, m]."""
    padding = -x.shape[1] % chunk_size
    return F.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, chunk_size))


def sums_between(steps: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``steps`` j + 1 ... i as element (i, j); 0 for j >= i.

    The sums are accumulated from j on. A difference of two sums from the start of the chunk would lose digits,
    especially in backward.

    Shapes:
        steps [..., l], output [..., l, l]
    """
    size = steps.shape[-1]
    is_summed = torch.ones(size, size, dtype=torch.bool, device=steps.device).tril(-1)
    return steps.unsqueeze(-1).masked_fill(~is_summed, 0.0).cumsum(-2)


def _document_masks(
    starts: torch.Tensor | None, length: int, chunk_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two masks: token i reads token j of its chunk, and token i reads the state before its chunk.

    Padding tokens continue the last document.

    Shapes:
        starts int32 [b, s] or None
        output bool [b or 1, c, l, l], bool [b or 1, c, l]
    """
    num_chunks = -(-length // chunk_size)
    positions = torch.arange(num_chunks * chunk_size, device=device).view(1, num_chunks, chunk_size)
    is_causal = positions.unsqueeze(-2) <= positions.unsqueeze(-1)  # [1, c, l, l]
    if starts is None:
        return is_causal, torch.ones_like(positions, dtype=torch.bool)
    padding = starts[:, -1:].expand(-1, num_chunks * chunk_size - length)
    by_chunk = torch.cat((starts, padding), dim=1).unflatten(1, (-1, chunk_size))  # [b, c, l]
    return is_causal & (positions.unsqueeze(-2) >= by_chunk.unsqueeze(-1)), by_chunk < positions[..., :1]
