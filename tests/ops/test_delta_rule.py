"""The chunked delta rule equals a loop over tokens in fp64: values and all gradients, with documents and states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.ops.delta_rule import ChunkedDeltaRule, gated_delta_rule
from tests.helpers.recurrent_samples import draw_starts, make_starts, values_and_grads, worst_difference
from tests.helpers.whole import random_tensor

TOLERANCE = 1e-12
BATCH, NUM_HEADS, KEY_SIZE, VALUE_SIZE = 2, 2, 3, 5


def loop(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor, starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return output and final state, computed token by token."""
    outputs = []
    decay = log_decay.exp().view(*log_decay.shape[:3], -1, 1)
    for idx in range(value.shape[1]):
        if starts is not None:
            state = state.masked_fill((starts[:, idx] == idx).view(-1, 1, 1, 1), 0.0)
        state = decay[:, idx] * state
        error = value[:, idx] - torch.einsum("bakv,bak->bav", state, key[:, idx])
        state = state + torch.einsum("bak,bav,ba->bakv", key[:, idx], error, beta[:, idx])
        outputs.append(torch.einsum("bakv,bak->bav", state, query[:, idx]))
    return torch.stack(outputs, dim=1), state


def make_inputs(length: int, has_decay_per_element: bool, decay_scale: float = 1.0) -> list[torch.Tensor]:
    """Return query, key, value, log decay, beta (0 to 2, as with negative eigenvalues) and initial state."""
    heads = (BATCH, length, NUM_HEADS)
    query, key = random_tensor(0, *heads, KEY_SIZE), F.normalize(random_tensor(1, *heads, KEY_SIZE), dim=-1)
    decay_shape = (*heads, KEY_SIZE) if has_decay_per_element else heads
    log_decay = -decay_scale * F.softplus(random_tensor(2, *decay_shape))
    beta = 2.0 * torch.sigmoid(random_tensor(3, *heads))
    state = random_tensor(4, BATCH, NUM_HEADS, KEY_SIZE, VALUE_SIZE)
    return [query, key, random_tensor(5, *heads, VALUE_SIZE), log_decay, beta, state]


def chunked(*inputs: torch.Tensor, starts: torch.Tensor | None = None, chunk_size: int = 8) -> Any:
    *tensors, state = inputs
    return gated_delta_rule(*tensors, starts=starts, initial_state=state, chunk_size=chunk_size)


@settings(max_examples=40)
@given(
    length=st.integers(1, 27),
    chunk_size=st.sampled_from([1, 2, 4, 8, 16, 64]),
    has_decay_per_element=st.booleans(),
    has_starts=st.booleans(),
    data=st.data(),
)
def test_values_and_gradients_match_loop(
    length: int, chunk_size: int, has_decay_per_element: bool, has_starts: bool, data: Any
) -> None:
    inputs = make_inputs(length, has_decay_per_element)
    starts = draw_starts(data.draw, BATCH, length) if has_starts else None
    expected = values_and_grads(loop, inputs, starts=starts)
    actual = values_and_grads(chunked, inputs, starts=starts, chunk_size=chunk_size)
    assert worst_difference(actual, expected) <= TOLERANCE


@pytest.mark.parametrize("has_decay_per_element", [False, True])
@pytest.mark.parametrize("decay_scale", [0.0, 20.0, 1000.0])
def test_decays_from_none_to_total_have_finite_gradients(has_decay_per_element: bool, decay_scale: float) -> None:
    """A quotient of cumulative decays would overflow, and a masked infinity would give NaN gradients."""
    inputs = make_inputs(70, has_decay_per_element, decay_scale)
    expected, actual = values_and_grads(loop, inputs), values_and_grads(chunked, inputs, chunk_size=64)
    assert all(x.isfinite().all() for x in actual)
    assert worst_difference(actual, expected) <= TOLERANCE


@pytest.mark.parametrize("has_decay_per_element", [False, True])
def test_packed_documents_equal_separate_documents(has_decay_per_element: bool) -> None:
    lengths = [5, 1, 13, 8]
    *inputs, _ = make_inputs(sum(lengths), has_decay_per_element)
    starts = make_starts(sum(lengths), [[0, 5, 6, 19]] * BATCH)
    packed, state = gated_delta_rule(*inputs, starts=starts, chunk_size=8)
    separate = [gated_delta_rule(*parts) for parts in zip(*(x.split(lengths, dim=1) for x in inputs), strict=True)]
    torch.testing.assert_close(packed, torch.cat([output for output, _ in separate], 1), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(state, separate[-1][1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("has_decay_per_element", [False, True])
def test_strong_decays_of_a_document_leave_the_digits_of_the_next_one(has_decay_per_element: bool) -> None:
    *inputs, _ = (x.float() for x in make_inputs(40, has_decay_per_element))
    log_decay = inputs[3]
    log_decay[:, :9] *= 1000.0
    starts = make_starts(40, [[0, 9]] * BATCH)
    packed, state = gated_delta_rule(*inputs, starts=starts)
    separate, separate_state = gated_delta_rule(*(x[:, 9:] for x in inputs))
    torch.testing.assert_close(packed[:, 9:], separate, rtol=0, atol=5e-6)
    torch.testing.assert_close(state, separate_state, rtol=0, atol=5e-6)


@settings(max_examples=20)
@given(length=st.integers(1, 20), has_decay_per_element=st.booleans(), has_starts=st.booleans(), data=st.data())
@example(length=1, has_decay_per_element=False, has_starts=False, data=None)
def test_final_state_is_affine_in_initial_state(
    length: int, has_decay_per_element: bool, has_starts: bool, data: Any
) -> None:
    """Values and gradients of ``transition @ initial + state from zero``."""
    inputs = make_inputs(length, has_decay_per_element)
    starts = draw_starts(data.draw, BATCH, length) if has_starts else None

    def by_transition(*leaves: torch.Tensor) -> torch.Tensor:
        *tensors, initial = leaves
        transition, from_zero = ChunkedDeltaRule(*tensors, starts=starts, chunk_size=8).transition_and_state()
        return transition @ initial + from_zero

    expected = values_and_grads(lambda *leaves: loop(*leaves, starts=starts)[1], inputs)
    assert worst_difference(values_and_grads(by_transition, inputs), expected) <= TOLERANCE


def test_token_by_token_continues_first_pass() -> None:
    """The state of a prompt and single tokens, as in generation."""
    *inputs, _ = make_inputs(21, False)
    expected, _ = gated_delta_rule(*inputs)
    output, state = gated_delta_rule(*(x[:, :13] for x in inputs), chunk_size=8)
    outputs = [output]
    for idx in range(13, 21):
        output, state = gated_delta_rule(*(x[:, idx : idx + 1] for x in inputs), initial_state=state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("has_decay_per_element", [False, True])
def test_key_heads_are_shared_by_neighbouring_value_heads(has_decay_per_element: bool) -> None:
    query, key, value, log_decay, beta, state = make_inputs(9, has_decay_per_element)
    inputs = [query[:, :, :1], key[:, :, :1], value, log_decay, beta, state]
    expected = values_and_grads(
        lambda query, key, *leaves: loop(*(x.expand(-1, -1, NUM_HEADS, -1) for x in (query, key)), *leaves), inputs
    )
    assert worst_difference(values_and_grads(chunked, inputs), expected) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_are_fp32(dtype: torch.dtype) -> None:
    *inputs, _ = (x.to(dtype) for x in make_inputs(40, True))
    output, state = gated_delta_rule(*inputs)
    assert (output.dtype, state.dtype) == (dtype, torch.float32)
    fp64_inputs = [x.double() for x in inputs]
    expected, expected_state = gated_delta_rule(*fp64_inputs)
    torch.testing.assert_close(output, expected.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)
    torch.testing.assert_close(state, expected_state.float(), rtol=1e-4, atol=1e-5)


def test_rejects_chunk_size_that_is_no_power_of_2() -> None:
    *inputs, _ = make_inputs(3, False)
    with pytest.raises(ValueError, match="power of 2, got 48"):
        gated_delta_rule(*inputs, chunk_size=48)
