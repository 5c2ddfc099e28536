"""Mamba-2's recurrence in chunks equals a loop over tokens, in values and all gradients, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.ops.document_attention import document_starts
from megatron.ops.state_space import ChunkedStateSpace, state_space_scan, sums_between
from tests.helpers.documents import segment_ids_from_lengths
from tests.helpers.recurrent_samples import draw_starts, values_and_grads, worst_difference

TOLERANCE = 1e-12
HEAD_SIZE, STATE_SIZE, CHUNK = 3, 5, 8
Tensors = list[torch.Tensor]


def scan_by_token(
    x: torch.Tensor, log_decay: torch.Tensor, b_t: torch.Tensor, c_t: torch.Tensor, state: torch.Tensor,
    starts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return outputs and the last state, one token at a time."""
    heads_per_group = x.shape[2] // b_t.shape[2]
    b_t, c_t = (y.repeat_interleave(heads_per_group, dim=2) for y in (b_t, c_t))
    outputs = []
    for i in range(x.shape[1]):
        if starts is not None:
            state = torch.where((starts[:, i] == i)[:, None, None, None], torch.zeros_like(state), state)
        state = log_decay[:, i, :, None, None].exp() * state + x[:, i].unsqueeze(-1) * b_t[:, i].unsqueeze(-2)
        outputs.append((state @ c_t[:, i].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, dim=1), state


def make_inputs(length: int, heads: tuple[int, int] = (4, 2), rows: int = 2, seed: int = 0) -> Tensors:
    """Return random x, log_decay, b_t, c_t and an initial state, of which some decays are strong."""
    num_heads, num_groups = heads
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (rows, length, num_heads, HEAD_SIZE), (rows, length, num_heads), (rows, length, num_groups, STATE_SIZE),
        (rows, length, num_groups, STATE_SIZE), (rows, num_heads, HEAD_SIZE, STATE_SIZE),
    ]  # fmt: skip
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    inputs[1] = -inputs[1].exp()
    return inputs


def scan_in_chunks(
    x: torch.Tensor, log_decay: torch.Tensor, b_t: torch.Tensor, c_t: torch.Tensor, state: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return outputs and the last state, by chunks of ``CHUNK`` tokens."""
    return state_space_scan(x, log_decay, b_t, c_t, starts=starts, initial_state=state, chunk_size=CHUNK)


@given(
    data=st.data(),
    length=st.integers(1, 4 * CHUNK + 3),
    heads=st.sampled_from([(4, 2), (4, 1), (3, 3)]),
    has_documents=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_chunks_match_loop_over_tokens(data: Any, length: int, heads: tuple[int, int], has_documents: bool) -> None:
    inputs = make_inputs(length, heads)
    starts = draw_starts(data.draw, 2, length) if has_documents else None
    actual = values_and_grads(scan_in_chunks, inputs, starts)
    assert worst_difference(actual, values_and_grads(scan_by_token, inputs, starts)) <= TOLERANCE


@given(data=st.data(), length=st.integers(1, 3 * CHUNK))
@settings(max_examples=25, deadline=None)
def test_last_state_is_affine_in_initial_state(data: Any, length: int) -> None:
    inputs, starts = make_inputs(length), draw_starts(data.draw, 2, length)
    scan = ChunkedStateSpace(*inputs[:4], starts=starts, chunk_size=CHUNK)
    transition, from_zeros = scan.transition_and_state()
    _, expected = scan_by_token(*inputs, starts)
    assert worst_difference([transition[..., None, None] * inputs[4] + from_zeros], [expected]) <= TOLERANCE
    assert worst_difference([scan(inputs[4])[1]], [expected]) <= TOLERANCE


def test_packed_documents_match_separate_documents() -> None:
    lengths = [1, CHUNK, 3, 2 * CHUNK + 1]
    inputs = make_inputs(sum(lengths), rows=1)[:4]
    starts = document_starts(segment_ids_from_lengths(lengths, sum(lengths)).unsqueeze(0))
    separate = [
        scan_in_chunks(*document, None) for document in zip(*(x.split(lengths, 1) for x in inputs), strict=True)
    ]
    expected = [torch.cat([output for output, _ in separate], dim=1), separate[-1][1]]
    assert worst_difference(scan_in_chunks(*inputs, starts=starts), expected) <= TOLERANCE


def test_strong_decays_leave_no_nan() -> None:
    """If decays underflow, exp(-log_decay) would overflow, and backward would multiply 0 by infinity."""
    inputs = make_inputs(3 * CHUNK)
    inputs[1].mul_(1e4)
    starts = torch.zeros(2, 3 * CHUNK, dtype=torch.int32)
    starts[0, CHUNK:] = CHUNK
    assert all(x.isfinite().all() for x in values_and_grads(scan_in_chunks, inputs, starts))


def test_decays_after_a_strong_decay_keep_their_digits() -> None:
    """A difference of two sums from the start of the chunk would have the rounding errors of both."""
    steps = torch.full((8,), -0.01, dtype=torch.float32)
    steps[1] = -1e4
    sums = sums_between(steps)
    torch.testing.assert_close(sums.double(), sums_between(steps.double()), rtol=1e-6, atol=0)


def test_continuing_from_a_state_matches_one_pass() -> None:
    """As in generation: a prompt, then single tokens."""
    inputs = make_inputs(CHUNK + 3)[:4]
    output, state = scan_in_chunks(*(x[:, :CHUNK] for x in inputs))
    outputs = [output]
    for i in range(CHUNK, CHUNK + 3):
        output, state = scan_in_chunks(*(x[:, i : i + 1] for x in inputs), state)
        outputs.append(output)
    assert worst_difference([torch.cat(outputs, dim=1), state], scan_in_chunks(*inputs)) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_at_least_fp32(dtype: torch.dtype) -> None:
    inputs = [x.to(dtype) for x in make_inputs(2 * CHUNK)]
    output, state = scan_in_chunks(*inputs)
    expected, expected_state = scan_in_chunks(*(x.double() for x in inputs))
    assert output.dtype == dtype and state.dtype == torch.float32
    assert worst_difference([state], [expected_state]) <= 1e-5
    assert worst_difference([output], [expected]) <= (1e-5 if dtype == torch.float32 else 2**-8)
