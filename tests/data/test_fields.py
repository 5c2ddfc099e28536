from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import T5Tokens
from megatron.data.fields import gpt2_fields, t5_fields

ALL = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


def test_documents_are_told_apart() -> None:
    fields = gpt2_fields(torch.tensor([[5, 6, 0, 7, 0, 0, 8]]), eod_id=0, **ALL)
    assert fields["tokens"].tolist() == [[5, 6, 0, 7, 0, 0]] and fields["labels"].tolist() == [[6, 0, 7, 0, 0, 8]]
    assert fields["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert fields["segment_ids"].tolist() == [[0, 0, 0, 1, 1, 2]] and fields["segment_ids"].dtype == torch.int32
    assert fields["loss_mask"].tolist() == [[1, 1, 0, 1, 0, 0]] and fields["loss_mask"].dtype == torch.float32


def test_without_options_nothing_is_reset_or_masked() -> None:
    fields = gpt2_fields(torch.tensor([[5, 0, 7], [0, 0, 0]]), eod_id=0)
    assert fields["position_ids"].tolist() == [[0, 1], [0, 1]] and fields["segment_ids"] is None
    assert fields["loss_mask"].min() == 1


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=1, max_size=4))
def test_equal_to_a_loop(rows: list[list[int]]) -> None:
    fields = gpt2_fields(torch.tensor(rows), eod_id=0, **ALL)
    for row, positions, segments in zip(
        rows, fields["position_ids"].tolist(), fields["segment_ids"].tolist(), strict=True
    ):
        position = segment = 0
        for place, token in enumerate(row[:-1]):
            assert (positions[place], segments[place]) == (position, segment)
            position, segment = (0, segment + 1) if token == 0 else (position + 1, segment)


@pytest.mark.parametrize("option", list(ALL))
def test_an_option_without_an_end_of_document_token_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match="--eod-mask-loss"):
        gpt2_fields(torch.zeros(1, 3, dtype=torch.long), **{option: True})


TOKENS = T5Tokens(eos_id=1, start_id=2, pad_id=3, sentinels=(99, 98))


def test_t5_s_decoder_reads_late_and_starts_anew_in_each_document() -> None:
    inputs, enc_segments = torch.tensor([[5, 99, 6, 98, 7, 99, 1]]), torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    targets = torch.tensor([[99, 10, 98, 11, 12, 99, 13, 1, 3, 3]])
    dec_segments = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1, -1]], dtype=torch.int32)
    fields = t5_fields(inputs, targets, enc_segments, dec_segments, tokens=TOKENS, has_segments=True)
    assert fields["enc_tokens"] is inputs and fields["labels"] is targets
    assert fields["dec_tokens"].tolist() == [[2, 99, 10, 98, 11, 2, 99, 13, 3, 3]]
    assert fields["loss_mask"].tolist() == [[1] * 8 + [0] * 2] and fields["loss_mask"].dtype == torch.float32
    assert fields["enc_segments"] is enc_segments and fields["dec_segments"] is dec_segments


def test_t5_without_segments_still_masks_padding_and_rows_do_not_mix() -> None:
    targets = torch.tensor([[99, 10, 1, 3], [98, 11, 12, 1]])
    dec_segments = torch.tensor([[0, 0, 0, -1], [0, 0, 0, 0]])
    inputs = torch.zeros(2, 5, dtype=torch.long)
    fields = t5_fields(inputs, targets, inputs, dec_segments, tokens=TOKENS, has_segments=False)
    assert fields["enc_segments"] is None and fields["dec_segments"] is None
    assert fields["dec_tokens"].tolist() == [[2, 99, 10, 3], [2, 98, 11, 12]]
    assert fields["loss_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
