"""Rows of the start table that tell which data are read, and how texts become samples."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config import Config
from megatron.config.data import EACH


def sample_rows(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the rows on how texts become samples: none of GPT-2 where documents lie end to end as they are."""
    data = config.data
    if config.own.is_encoder_decoder and data.cuts_spans:
        yield "spans", _spans_text(config)
    if data.packing == "best-fit":
        yield "packing", "best-fit: whole documents, kept apart; what they leave of a sample is padded"
    if data.fim_rate:
        first = f"{100 * data.fim_spm_rate:g} % with the suffix first"
        yield "fill in the middle", f"{100 * data.fim_rate:g} % of the documents, of these {first}"


def data_text(config: Config) -> str:
    """Return which token files the splits are read from."""
    data = config.data
    if data.data_path is not None:
        by = " by hash" if data.split_by == "hash" else ""
        paths = f"{data.data_path}, split {data.split}{by}"
    else:
        named = [f"{name.split('_')[0]} {getattr(data, name)}" for name in EACH if getattr(data, name) is not None]
        paths = ", ".join(named) or "the script's own"
    return paths + (f", weights from tokens on: {data.mixture_schedule}" if data.mixture_schedule else "")


def _spans_text(config: Config) -> str:
    """Return how a text becomes a sample of T5."""
    t5 = config.own
    kind = f"noise density {t5.noise_density:g}, mean span length {t5.mean_span_length:g}"
    if t5.denoisers != "R":
        kind = f"denoisers {t5.denoisers}"
    most = "up to " if len(t5.kinds) > 1 else ""
    text = f"{t5.raw_length} tokens of text become {most}{t5.enc_seq_length} of inputs"
    return f"{text} and {most}{t5.longest_target} of targets; {kind}"
