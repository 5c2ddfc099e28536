"""Facts of token files as tables that a person reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table
from rich.text import Text

from megatron.data.inspect import ids
from megatron.data.inspect.facts import Facts
from megatron.data.inspect.words import Words

if TYPE_CHECKING:
    from megatron.data.token_file import TokenFile
    from megatron.tokenizer import Tokenizer

_SHOWN_OF_AN_IDENTITY = 16


def table(facts: Facts, tokenizer: Tokenizer | None) -> Table:
    """Return names and values of what is known of one pair."""
    shown = Table(title=Text(facts.prefix), title_justify="left", show_header=False)
    shown.add_column("name", no_wrap=True)
    shown.add_column("value", overflow="fold")
    for name, value in rows(facts, tokenizer):
        shown.add_row(name, Text(value))
    return shown


def rows(facts: Facts, tokenizer: Tokenizer | None) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each row."""
    lengths = facts.lengths
    yield "documents", f"{facts.num_documents:,}"
    yield "tokens", f"{facts.num_tokens:,} as {facts.dtype}, {facts.bin_bytes:,} bytes"
    if lengths.num_documents:
        quantiles = [lengths.quantile(share) for share in (0.0, 0.5, 0.99, 1.0)]
        names = ("shortest", "median", "99 % up to", "longest")
        told = [f"{name} {value:,}" for name, value in zip(names, quantiles, strict=True)]
        yield "tokens a document", ", ".join([*told[:2], f"mean {lengths.mean:,.1f}", *told[2:]])
        yield "empty documents", f"{lengths.num_empty:,}"
    yield "end of document", _ends(facts)
    yield "largest id", str(facts.max_token_id) if facts.num_tokens else "none, there are no tokens"
    yield "vocabulary", _vocabulary(facts, tokenizer)


def _ends(facts: Facts) -> str:
    if facts.eod_id is None:
        return "not known: no .meta.json and no tokenizer says which token that is"
    if facts.eod_share is None:
        return f"id {facts.eod_id}; there is no document to look at"
    return f"{facts.eod_share:.1%} of {facts.ends_looked_at:,} documents looked at end with id {facts.eod_id}"


def _vocabulary(facts: Facts, tokenizer: Tokenizer | None) -> str:
    sidecar = facts.sidecar
    if sidecar is None:
        told = "not known, there is no .meta.json"
    elif not sidecar.tokenizer:
        told = f"{sidecar.vocab_size:,} ids, of a tokenizer that is not named"
    else:
        told = f"{sidecar.vocab_size:,} ids, identity {sidecar.tokenizer[:_SHOWN_OF_AN_IDENTITY]}"
    if tokenizer is None:
        return told
    if sidecar is None or not sidecar.tokenizer:
        fits = "holds all ids" if facts.max_token_id < tokenizer.vocab_size else "is too small for these ids"
        return f"{told}; the tokenizer given has {tokenizer.vocab_size:,} and {fits}"
    same = "the tokenizer given is that one" if sidecar.tokenizer == tokenizer.identity else "the one given is ANOTHER"
    return f"{told}; {same}"


def commonest(token_file: TokenFile, count: int, tokenizer: Tokenizer | None) -> Table:
    """Return the ``count`` ids that occur most often with their share of all tokens; reads all of them."""
    totals = ids.counts(token_file)
    words = None if tokenizer is None else Words(tokenizer)
    shown = Table(title="commonest tokens", title_justify="left")
    for name in ("id", "tokens", "share", "text"):
        shown.add_column(name, justify="left" if name == "text" else "right", overflow="fold")
    for token in np.argsort(-totals, kind="stable")[:count]:
        if totals[token]:
            share = f"{totals[token] / token_file.num_tokens:.2%}"
            shown.add_row(str(token), f"{totals[token]:,}", share, Text(words.short(int(token)) if words else ""))
    return shown
