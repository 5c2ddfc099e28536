"""A stream as text and as a table: every boundary and every token without loss can be seen without colours."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch
from rich.console import Console

from megatron.data import gpt2_fields
from megatron.data.inspect import view
from megatron.data.inspect.view import Section, Stream, TokenFormatter, gpt2_streams, sections, t5_streams
from megatron.models.t5.data import T5Tokens, t5_fields

EOD = 0


class Letters:
    """A tokenizer whose token i is the i-th letter; 0 ends a document."""

    vocab_size, eod_id = 27, EOD
    control_tokens = {"<eod>": EOD}

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") - 1 + token) for token in ids)


WORDS = TokenFormatter(Letters())


def render(stream: Stream, words: TokenFormatter = WORDS, num_rows: int = 0) -> str:
    output = io.StringIO()
    view.print_stream(stream, words, Console(file=output, width=120), num_rows)
    return output.getvalue()


def make_gpt2_stream(tokens: list[int], segments: list[int] | None = None, **flags: bool) -> Stream:
    segment_ids = None if segments is None else torch.tensor([segments], dtype=torch.int32)
    return gpt2_streams(gpt2_fields(torch.tensor([tokens]), eod_id=EOD, segments=segment_ids, **flags), EOD)[0]


def test_documents_have_headings_and_masked_end_in_brackets() -> None:
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    assert render(make_gpt2_stream([1, 2, EOD, 3, EOD, 5], **flags)).splitlines() == [
        "inputs, 5 tokens",
        "---- document 0: tokens 0-2, positions 0-2, separated",
        "ab[no loss: <eod>]",
        "---- document 1: tokens 3-4, positions 0-1, separated",
        "c[no loss: <eod>]",
    ]


def test_unseparated_documents_are_split_at_end_tokens() -> None:
    assert render(make_gpt2_stream([1, 2, EOD, 3, 4, 5])).splitlines()[1:] == [
        "---- document 0: tokens 0-2, positions 0-2, not separated from the other documents",
        "ab<eod>",
        "---- document 1: tokens 3-4, positions 3-4, not separated from the other documents",
        "cd",
    ]


def test_padding_of_packed_documents_is_counted_without_loss() -> None:
    text = render(make_gpt2_stream([1, 2, 3, EOD, EOD, EOD, EOD], [0, 0, 1, -1, -1, -1, -1]))
    assert "---- document 1: tokens 2-2, positions 0-0, separated" in text
    assert "---- padding: tokens 3-5\n[no loss: <eod> x 3]" in text


def test_table_shows_rows_on_both_sides_of_boundaries() -> None:
    stream = make_gpt2_stream([1, 2, 3, 4, EOD, 5, 6, 7, 8, 9], eod_mask_loss=True, reset_attention_mask=True)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in render(stream, num_rows=2).splitlines()]
    rows = [row for row in cells if row]
    assert [row[0] for row in rows] == ["0", "1", "...", "3", "4", "5", "...", "8"]
    assert rows[4] == ["4", "0 <eod>", "5 'e'", "0", "4", "0"]  # token, input, label, loss, position, document
    assert rows[5] == ["5", "5 'e'", "6 'f'", "1", "5", "1"]


def test_t5_view_shows_inputs_decoder_inputs_and_targets_with_sentinels() -> None:
    tokens = T5Tokens.appended(27, 3, EOD)  # sentinels 29, 28, 27
    row = {
        "inputs": [1, 29, 4, EOD, EOD],
        "targets": [29, 2, 3, EOD, EOD],
        "enc_segments": [0, 0, 0, 0, -1],
        "dec_segments": [0, 0, 0, 0, -1],
    }
    fields = t5_fields(**{key: torch.tensor([values]) for key, values in row.items()}, tokens=tokens, has_segments=True)
    streams = t5_streams(fields, EOD)
    texts = [render(stream, TokenFormatter(Letters(), tokens.names)).splitlines() for stream in streams]
    assert [text[0] for text in texts] == ["inputs, 5 tokens", "decoder inputs, 5 tokens", "targets, 5 tokens"]
    assert [text[2] for text in texts] == ["a<1>d<eod>", "<eod><1>bc", "<1>bc<eod>"]
    assert texts[2][3:] == ["---- padding: tokens 4-4", "[no loss: <eod>]"]
    assert "29 <1>" in render(streams[1], TokenFormatter(Letters(), tokens.names), num_rows=5)


def test_document_text_is_not_parsed_as_rich_markup() -> None:
    class Brackets(Letters):
        def decode(self, ids: Sequence[int]) -> str:
            return "[bold]x[/bold]"

    assert "[bold]x[/bold]" in render(make_gpt2_stream([1, 2, 3]), TokenFormatter(Brackets()))


def test_position_reset_starts_new_section() -> None:
    stream = Stream(title="t", tokens=np.arange(1, 5), positions=np.array([0, 1, 0, 1]))
    assert list(sections(stream)) == [Section(0, 2, 0), Section(2, 4, 1)]
