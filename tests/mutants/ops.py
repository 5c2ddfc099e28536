"""Mutants of attention, positions and expert products."""

from __future__ import annotations

from typing import Any

import torch

from megatron.ops.grouped import _looked_up
from tests.mutants.mutant import mutant

CAUSAL = "tests/ops/test_causal_attention.py"
BLOCKS = f"{CAUSAL}::test_it_equals_the_formula_and_so_does_the_gradient[whole blocks]"
BIASED = "tests/ops/test_biased_attention.py::test_it_equals_the_formula_and_so_do_all_gradients"
BIASED_BY_HEAD = f"{BIASED}[no mask-made twice-a head-False]"
DOCUMENTS = "tests/ops/test_document_attention.py::test_heads_in_turns_have_their_own_slopes"
EXPERTS = "tests/models/common/test_experts.py::test_a_layer_is_a_loop_over_tokens[softmax]"
ROTARY = "tests/ops/test_rotary.py"


@mutant("megatron.ops.causal_attention:Room.__init__", f"{CAUSAL}::test_a_later_token_changes_nothing_before_it")
def query_sees_the_next_key(original: Any) -> Any:
    def init(self: Any, packed: Any, count: int) -> None:
        original(self, packed, count)
        self.future.copy_(torch.full_like(self.future, float("-inf")).triu_(2))

    return init


@mutant("megatron.ops.causal_attention:_Sum.add", BLOCKS)
def key_gradients_of_earlier_blocks_are_lost(original: Any) -> Any:
    def add(self: Any, left: Any, right: Any) -> None:
        if not self._is_first:
            self._rows.zero_()
        original(self, left, right)

    return add


@mutant("megatron.ops.causal_attention:_softmax_backward", BLOCKS)
def gradient_of_the_softmax_is_left_out(original: Any) -> Any:
    return lambda grad, *softmax, grad_input: grad_input


@mutant("megatron.ops.biased_attention:_add_samples", BIASED_BY_HEAD)
def bias_gradient_is_that_of_the_last_sample(original: Any) -> Any:
    return lambda total, scores, *, is_first: original(total, scores, is_first=True)


@mutant("megatron.ops.biased_attention:diagonal_sums", BIASED_BY_HEAD)
def bias_gradient_is_shifted_by_one_distance(original: Any) -> Any:
    return lambda matrices: original(matrices).roll(1, -1)


@mutant("megatron.ops.document_attention:document_starts", DOCUMENTS)
def query_sees_the_last_token_of_the_previous_document(original: Any) -> Any:
    return lambda segment_ids: (original(segment_ids) - 1).clamp(min=0)


@mutant(
    "megatron.ops.positions:rotated",
    f"{ROTARY}::test_a_number_and_the_one_half_a_head_away_turn_by_position_times_frequency",
)
def rotary_embedding_turns_backwards(original: Any) -> Any:
    return lambda x, cosine, sine: original(x, cosine, -sine)


@mutant("megatron.ops.positions:_made", f"{ROTARY}::test_long_positions_are_exact[131071]")
def rotary_angles_are_computed_in_fp32(original: Any) -> Any:
    def made(rotary: Any, rows: int, dtype: torch.dtype, device: torch.device) -> Any:
        angles = torch.arange(rows, dtype=torch.float32).unsqueeze(1) * torch.tensor(rotary.frequencies())
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)

    return made


@mutant(
    "megatron.ops.positions:alibi_slopes",
    "tests/ops/test_alibi.py::test_any_number_of_heads_has_the_slopes_of_the_paper_and_of_hugging_face[8]",
)
def alibi_slopes_assume_a_power_of_two(original: Any) -> Any:
    return lambda num_heads, bias_max=8.0: [2.0 ** (-bias_max * k / num_heads) for k in range(1, num_heads + 1)]


@mutant("megatron.ops.grouped:_Send.backward", EXPERTS)
def gradient_of_a_token_is_that_of_its_first_expert(original: Any) -> Any:
    def backward(ctx: Any, *grads: Any) -> Any:
        return _looked_up(grads[0], ctx.slots)[:, 0], None

    return backward
