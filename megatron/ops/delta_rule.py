"""Gated delta rule of linear attention, in chunks of tokens: Gated DeltaNet and Kimi Delta Attention.

The state S [d_k, d_v] of a head maps keys to values. A token multiplies the state by its decay, replaces the fraction
beta of the value that the state returns for the token's key, and reads the state with its query:

    S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T
    o_t = S_t^T q_t

The decay exp(g_t) is a number per head (Gated DeltaNet) or per head and element of the key (Kimi Delta Attention).

Within a chunk, let G be the cumulative sum of g, and S the state before the chunk. The values u_i that the tokens add
to the state are the solution of a triangular system. The output and the next state are computed from them:

    u_i + beta_i sum_{j<i} A_ij u_j = beta_i v_i - beta_i (k_i exp(G_i))^T S    A_ij = sum_d k_id k_jd exp(G_id - G_jd)
    o_i = (q_i exp(G_i))^T S + sum_{j<=i} P_ij u_j                              P_ij = sum_d q_id k_jd exp(G_id - G_jd)
    S'  = diag(exp(G_last)) S + sum_j (k_j exp(G_last - G_j)) u_j^T

The right-hand side is affine in S, so the system is solved once for all chunks at the same time (U and W with
u = U - W S), and only the products with S run chunk by chunk. The final state is affine in the initial state too:
``transition @ initial + state from zero``. Context-parallel ranks exchange these two terms.

All exponents are at most 0. With a decay per element, A and P are assembled from blocks whose exponents are relative to
the decay in the middle of the block (``_decayed_products``). For 16-bit inputs, states, decays and the system are in
fp32.

Source: Yang et al. 2024, "Parallelizing linear transformers with the delta rule over sequence length"; Yang et al.
2025, "Gated delta networks"; Kimi Team 2025, "Kimi Linear", section 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.ops.state_space import sums_between


def gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, *,
    starts: torch.Tensor | None = None, initial_state: torch.Tensor | None = None, chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Apply the gated delta rule to a sequence.

    Shapes:
        query, key    [b, s, g, d_k]; each head is shared by a/g neighbouring value heads
        value         [b, s, a, d_v]
        log_decay     [b, s, a], or [b, s, a, d_k] for a decay per element of the key; at most 0
        beta          [b, s, a]
        starts        int32 [b, s], the index of the first token of each token's document, negative if the document
                      starts before this sequence; None: one document, which continues ``initial_state``
        initial_state [b, a, d_k, d_v]; None: zeros
        output        [b, s, a, d_v]
        state         [b, a, d_k, d_v], after the last token; in fp32 for 16-bit inputs

    Args:
        chunk_size: tokens per chunk, a power of 2.
    """
    return ChunkedDeltaRule(query, key, value, log_decay, beta, starts=starts, chunk_size=chunk_size)(initial_state)


class ChunkedDeltaRule:
    """The gated delta rule of a sequence, prepared for any initial state.

    Shapes and arguments: as in ``gated_delta_rule``. Tensors of chunks have the shape [n, b, a, C, ...]: n chunks of C
    tokens.
    """

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor,
        *, starts: torch.Tensor | None = None, chunk_size: int = 64,
    ) -> None:  # fmt: skip
        if chunk_size & (chunk_size - 1):
            raise ValueError(f"chunk_size must be a power of 2, got {chunk_size}")
        _, length, num_heads, value_size = value.shape
        size = min(chunk_size, 1 << (length - 1).bit_length())
        dtype = torch.promote_types(value.dtype, torch.float32)
        self._length, self._value_size, self._dtype = length, value_size, value.dtype
        query, key, value, log_decay, beta = (
            _split_into_chunks(x.to(dtype), num_heads, size)
            for x in (
                query,
                key,
                value,
                log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1),
                beta[..., None],
            )
        )
        from_state = log_decay.cumsum(-2).exp()  # [n, b, a, C, 1 or d_k]
        masks = _DocumentMasks(starts, size, len(value), value.device)
        products = _decayed_products(torch.stack((query, key)), key, log_decay, masks.is_visible)
        self._query_products, key_products = products.unbind(0)  # P and A, [n, b, a, C, C]
        decayed_key = masks.without_new_documents(key * from_state)
        right_sides = torch.cat((beta * value, beta * decayed_key), dim=-1)
        solution = torch.linalg.solve_triangular(beta * key_products, right_sides, upper=False, unitriangular=True)
        self._values, self._reads = solution.split([value_size, key.shape[-1]], dim=-1)  # U and W
        self._decayed_query = masks.without_new_documents(query * from_state)
        self._writes = masks.without_old_documents(key * _sums_after(log_decay).exp()).transpose(-1, -2)
        # [n, b, a, 1 or d_k, 1]
        self._state_decay = masks.without_new_documents(from_state)[..., -1:, :].transpose(-1, -2)

    def __call__(self, initial_state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the final state."""
        state = self._zeros(self._value_size) if initial_state is None else initial_state.to(self._values.dtype)
        outputs = []
        for values, reads, writes, decay, query, products in zip(
            # ``unbind`` has one concatenation as its backward; indexing would add up full tensors, one per chunk
            *(x.unbind(0) for x in self._scan_inputs()),
            self._decayed_query.unbind(0),
            self._query_products.unbind(0),
            strict=True,
        ):
            added = values - reads @ state  # [b, a, C, d_v]
            outputs.append(query @ state + products @ added)
            state = decay * state + writes @ added
        output = torch.stack(outputs).permute(1, 0, 3, 2, 4).flatten(1, 2)  # [b, n C, a, d_v]
        return output[:, : self._length].to(self._dtype), state

    def transition_and_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the transition [b, a, d_k, d_k] and the final state for an initial state of zeros.

        The transition is the final state if the initial state is the identity matrix and all values are zero.
        """
        key_size = self._reads.shape[-1]
        unit = torch.eye(key_size, dtype=self._values.dtype, device=self._values.device)
        zeros = self._zeros(self._value_size)
        state = torch.cat((zeros, unit.expand(*zeros.shape[:2], -1, -1)), dim=-1)  # [b, a, d_k, d_v + d_k]
        for values, reads, writes, decay in zip(*(x.unbind(0) for x in self._scan_inputs()), strict=True):
            state = decay * state + writes @ (F.pad(values, (0, key_size)) - reads @ state)
        from_zero, transition = state.split([self._value_size, key_size], dim=-1)
        return transition, from_zero

    def _scan_inputs(self) -> tuple[torch.Tensor, ...]:
        return self._values, self._reads, self._writes, self._state_decay

    def _zeros(self, num_columns: int) -> torch.Tensor:
        """Return a state of zeros [b, a, d_k, num_columns]."""
        _, batch, num_heads, _, key_size = self._reads.shape
        return self._reads.new_zeros(batch, num_heads, key_size, num_columns)


class _DocumentMasks:
    """Masks of the tokens of a chunk by their documents.

    Shapes:
        is_visible bool [n, b, 1, C, C] or [C, C]: token j is before token i or is token i, in the same document
    """

    def __init__(self, starts: torch.Tensor | None, size: int, num_chunks: int, device: torch.device) -> None:
        self.is_visible = torch.ones(size, size, dtype=torch.bool, device=device).tril()
        self._is_new: torch.Tensor | None = None
        self._is_old: torch.Tensor | None = None
        if starts is None:
            return
        num_padding = num_chunks * size - starts.shape[1]
        padding = starts[:, -1:].expand(-1, num_padding)  # the padding continues the last document
        starts = torch.cat((starts, padding), dim=1).unflatten(1, (num_chunks, size)).transpose(0, 1).unsqueeze(2)
        positions = torch.arange(num_chunks * size, device=device).view(num_chunks, 1, 1, size)
        is_same_document = starts.unsqueeze(-1) <= positions.unsqueeze(-2)  # [n, b, 1, C, C], for j <= i
        self.is_visible = self.is_visible & is_same_document
        self._is_new = (starts >= positions[..., :1]).unsqueeze(-1)  # [n, b, 1, C, 1]
        self._is_old = ~is_same_document[..., -1, :].unsqueeze(-1)  # [n, b, 1, C, 1]

    def without_new_documents(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [n, b, a, C, d] with zeros for tokens of documents that start in the chunk."""
        return x if self._is_new is None else x.masked_fill(self._is_new, 0.0)

    def without_old_documents(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [n, b, a, C, d] with zeros for tokens of documents that end before the chunk's last token."""
        return x if self._is_old is None else x.masked_fill(self._is_old, 0.0)


def _split_into_chunks(x: torch.Tensor, num_heads: int, size: int) -> torch.Tensor:
    """Return ``x`` [b, s, g, d], padded with zeros to full chunks, as contiguous chunks [n, b, a, size, d]."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4)
    num_repeats = num_heads // x.shape[2]
    return (x.repeat_interleave(num_repeats, dim=2) if num_repeats > 1 else x).contiguous()


def _sums_after(x: torch.Tensor) -> torch.Tensor:
    """Return, for each token, the sum of ``x`` [..., C, d] over the later tokens of the chunk.

    A difference of two cumulative sums would include the rounding errors of other documents' decays.
    """
    return F.pad(x[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _decayed_products(
    rows: torch.Tensor, key: torch.Tensor, log_decay: torch.Tensor, is_visible: torch.Tensor
) -> torch.Tensor:
    """Return ``sum_d rows_id key_jd exp(G_id - G_jd)`` for the tokens j that are visible to i, and 0 for others.

    With a decay per element, a block of 2m tokens consists of four blocks of m tokens. The block of late rows i and
    early keys j is a product of ``rows_i exp(G_i - R)`` and ``key_j exp(R - G_j)``, where R is the decay sum of the
    last early token, so that no exponent is positive. The blocks on the diagonal are computed in the same way.

    Shapes:
        rows       [m, n, b, a, C, d_k]
        key        [n, b, a, C, d_k]
        log_decay  [n, b, a, C, 1 or d_k], g
        is_visible bool [n, b, 1, C, C] or [C, C]
        output     [m, n, b, a, C, C]
    """
    if log_decay.shape[-1] == 1:
        # masked before the exponential, so that gradients of other documents are 0
        exponents = sums_between(log_decay.squeeze(-1)).masked_fill(~is_visible, float("-inf"))
        return (rows @ key.transpose(-1, -2)) * exponents.exp()
    size, num_tokens = 1, key.shape[-2]
    blocks = (rows * key).sum(-1)[..., None, None]  # [m, n, b, a, C, 1, 1], the diagonal
    while size < num_tokens:
        early_decay, late_decay = log_decay.unflatten(-2, (-1, 2, size)).unbind(-3)  # [n, b, a, C / 2 size, size, d_k]
        late_rows = rows.unflatten(-2, (-1, 2, size))[..., 1, :, :] * late_decay.cumsum(-2).exp()
        early_keys = key.unflatten(-2, (-1, 2, size))[..., 0, :, :] * _sums_after(early_decay).exp()
        products = late_rows @ early_keys.transpose(-1, -2)  # [m, n, b, a, C / 2 size, size, size]
        early, late = blocks.unflatten(-3, (-1, 2)).unbind(-3)
        upper, lower = torch.cat((early, torch.zeros_like(early)), -1), torch.cat((products, late), -1)
        blocks = torch.cat((upper, lower), -2)
        size *= 2
    return blocks.squeeze(-3).masked_fill(~is_visible, 0.0)
