"""Mutants of attention, positions and expert products."""

from __future__ import annotations

from typing import Any

import torch

from megatron.ops.grouped import _look_up
from tests.mutants.mutant import mutant

CAUSAL = "tests/ops/test_causal_attention.py"
BLOCKS = f"{CAUSAL}::test_output_and_gradient_match_formula[whole blocks]"
BIASED = "tests/ops/test_biased_attention.py::test_output_and_gradients_match_formula"
BIASED_BY_HEAD = f"{BIASED}[no mask-made twice-a head-False]"
DOCUMENTS = "tests/ops/test_document_attention.py::test_head_blocks_use_their_slopes"
EXPERTS = "tests/models/common/test_experts.py::test_layer_matches_loop_over_tokens[softmax]"
ROTARY = "tests/ops/test_rotary.py"


@mutant(
    "megatron.ops.causal_attention:HeadBuffers.__init__", f"{CAUSAL}::test_later_tokens_do_not_affect_earlier_outputs"
)
def query_sees_the_next_key(original: Any) -> Any:
    def init(self: Any, packed: Any, count: int) -> None:
        original(self, packed, count)
        self.future_mask.copy_(torch.full_like(self.future_mask, float("-inf")).triu_(2))

    return init


@mutant("megatron.ops.causal_attention:_GradAccumulator.add", BLOCKS)
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
    "megatron.ops.positions:apply_rotary",
    f"{ROTARY}::test_pairs_rotate_by_position_times_frequency",
)
def rotary_embedding_turns_backwards(original: Any) -> Any:
    return lambda x, cosine, sine: original(x, cosine, -sine)


@mutant("megatron.ops.positions:_compute_table", f"{ROTARY}::test_long_positions_are_exact[131071]")
def rotary_angles_are_computed_in_fp32(original: Any) -> Any:
    def made(rotary: Any, rows: int, dtype: torch.dtype, device: torch.device) -> Any:
        angles = torch.arange(rows, dtype=torch.float32).unsqueeze(1) * torch.tensor(rotary.frequencies())
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)

    return made


@mutant(
    "megatron.ops.positions:alibi_slopes",
    "tests/ops/test_alibi.py::test_slopes_match_paper_and_hugging_face[8]",
)
def alibi_slopes_assume_a_power_of_two(original: Any) -> Any:
    return lambda num_heads, bias_max=8.0: [2.0 ** (-bias_max * k / num_heads) for k in range(1, num_heads + 1)]


@mutant("megatron.ops.grouped:_Dispatch.backward", EXPERTS)
def gradient_of_a_token_is_that_of_its_first_expert(original: Any) -> Any:
    def backward(ctx: Any, *grads: Any) -> Any:
        return _look_up(grads[0], ctx.slots)[:, 0], None, None

    return backward
