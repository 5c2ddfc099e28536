from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.gpt_fields import gpt2_fields
from megatron.models.common.decoder import DecoderModel
from megatron.models.t5.data import T5Tokens, t5_fields
from tests.helpers.model_samples import VOCAB, fill_weights, small_model_args

ALL_RESETS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


def test_documents_are_separated_at_eod_tokens() -> None:
    fields = gpt2_fields(torch.tensor([[5, 6, 0, 7, 0, 0, 8]]), eod_id=0, **ALL_RESETS)
    assert fields["tokens"].tolist() == [[5, 6, 0, 7, 0, 0]] and fields["labels"].tolist() == [[6, 0, 7, 0, 0, 8]]
    assert fields["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert fields["segment_ids"].tolist() == [[0, 0, 0, 1, 1, 2]] and fields["segment_ids"].dtype == torch.int32
    assert fields["loss_mask"].tolist() == [[1, 1, 0, 1, 0, 0]] and fields["loss_mask"].dtype == torch.float32


def test_defaults_reset_and_mask_nothing() -> None:
    fields = gpt2_fields(torch.tensor([[5, 0, 7], [0, 0, 0]]), eod_id=0)
    assert fields["position_ids"].tolist() == [[0, 1], [0, 1]] and fields["segment_ids"] is None
    assert fields["loss_mask"].min() == 1


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=1, max_size=4))
def test_gpt2_fields_match_loop(rows: list[list[int]]) -> None:
    fields = gpt2_fields(torch.tensor(rows), eod_id=0, **ALL_RESETS)
    for row, positions, segments in zip(
        rows, fields["position_ids"].tolist(), fields["segment_ids"].tolist(), strict=True
    ):
        position = segment = 0
        for idx, token in enumerate(row[:-1]):
            assert (positions[idx], segments[idx]) == (position, segment)
            position, segment = (0, segment + 1) if token == 0 else (position + 1, segment)


def test_segment_ids_separate_documents_regardless_of_tokens() -> None:
    segments = torch.tensor([[0, 0, 0, 1, 1, 2, 2, -1, -1], [0, 0, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    fields = gpt2_fields(torch.arange(18).reshape(2, 9), segments=segments)
    assert fields["segment_ids"].tolist() == segments[:, :-1].tolist() and fields["segment_ids"].dtype == torch.int32
    assert fields["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 0], [*range(8)]]
    assert fields["loss_mask"].tolist() == [[1, 1, 0, 1, 0, 1, 0, 0], [1] * 8]
    assert fields["loss_mask"].dtype == torch.float32 and fields["labels"][0].tolist() == [*range(1, 9)]
    masked = gpt2_fields(torch.arange(18).reshape(2, 9), segments=segments, eod_id=1, **ALL_RESETS)
    assert masked["loss_mask"].tolist() == [[1, 0, 0, 1, 0, 1, 0, 0], [1] * 8]
    assert torch.equal(masked["position_ids"], fields["position_ids"])
    assert torch.equal(masked["segment_ids"], fields["segment_ids"])


def test_packed_losses_equal_separate_document_losses() -> None:
    """GPT-2 in fp64, with padding behind the documents; no number is NaN, in no gradient either."""
    model = fill_weights(DecoderModel(small_model_args()).double())
    lengths, generator = [5, 3, 2], torch.Generator().manual_seed(1)
    text = torch.zeros(1, 13, dtype=torch.long)
    text[0, :10] = torch.randint(0, VOCAB, (10,), generator=generator)
    segments = torch.tensor([[0] * 5 + [1] * 3 + [2] * 2 + [-1] * 3], dtype=torch.int32)
    packed = gpt2_fields(text, segments=segments)
    assert torch.isfinite(model(packed["tokens"], packed["position_ids"], packed["segment_ids"])).all()
    loss, num_tokens = model(**packed)
    loss.backward()
    assert num_tokens == 7 and all(
        torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None
    )
    total = 0.0
    for segment, document in enumerate(text[0, :10].split(lengths)):
        document_loss, _ = model(**gpt2_fields(document[None]))
        document_mask = packed["loss_mask"] * (packed["segment_ids"] == segment)
        packed_document_loss, _ = model(**{**packed, "loss_mask": document_mask})
        assert packed_document_loss.item() == pytest.approx(document_loss.item(), rel=1e-12)
        total += document_loss.item()
    assert loss.item() == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("option", list(ALL_RESETS))
def test_option_without_eod_token_is_rejected(option: str) -> None:
    with pytest.raises(ValueError, match="--eod-mask-loss"):
        gpt2_fields(torch.zeros(1, 3, dtype=torch.long), **{option: True})


TOKENS = T5Tokens(eos_id=1, start_id=2, pad_id=3, sentinels=(99, 98))


def test_t5_decoder_inputs_are_shifted_and_restart_per_document() -> None:
    inputs, enc_segments = torch.tensor([[5, 99, 6, 98, 7, 99, 1]]), torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    targets = torch.tensor([[99, 10, 98, 11, 12, 99, 13, 1, 3, 3]])
    dec_segments = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1, -1]], dtype=torch.int32)
    fields = t5_fields(inputs, targets, enc_segments, dec_segments, tokens=TOKENS, has_segments=True)
    assert fields["enc_tokens"] is inputs and fields["labels"] is targets
    assert fields["dec_tokens"].tolist() == [[2, 99, 10, 98, 11, 2, 99, 13, 3, 3]]
    assert fields["loss_mask"].tolist() == [[1] * 8 + [0] * 2] and fields["loss_mask"].dtype == torch.float32
    assert fields["enc_segments"] is enc_segments and fields["dec_segments"] is dec_segments


def test_t5_without_segments_masks_padding_and_separates_rows() -> None:
    targets = torch.tensor([[99, 10, 1, 3], [98, 11, 12, 1]])
    dec_segments = torch.tensor([[0, 0, 0, -1], [0, 0, 0, 0]])
    inputs = torch.zeros(2, 5, dtype=torch.long)
    fields = t5_fields(inputs, targets, inputs, dec_segments, tokens=TOKENS, has_segments=False)
    assert fields["enc_segments"] is None and fields["dec_segments"] is None
    assert fields["dec_tokens"].tolist() == [[2, 99, 10, 3], [2, 98, 11, 12]]
    assert fields["loss_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
