"""What an encoder-decoder adds: two lengths, two heights, positions, spans, and where the pipeline's seam is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from megatron import spans
from megatron.config.data import DataConfig
from megatron.config.family import FamilyConfig
from megatron.config.model import ModelConfig
from megatron.config.option import option

_option = partial(option, families=("t5",), elsewhere="it is for T5; use pretrain_t5.py, or leave it out")
_length = partial(
    option, families=("t5",), elsewhere="it is for encoder-decoders; use pretrain_t5.py, or --seq-length here"
)
_layers = partial(
    option, families=("t5",), elsewhere="it is for encoder-decoders; use pretrain_t5.py, or --num-layers here"
)
_relative = partial(
    option,
    families=("t5",),
    elsewhere="GPT-2 has learned positions; leave it out, or use pretrain_t5.py",
    elsewhere_in={
        "llama": "LLaMA has rotary positions; leave it out, or use pretrain_t5.py",
        "mpt": "MPT has ALiBi in place of positions; leave it out, or use pretrain_t5.py",
        "bert": "BERT has learned positions; leave it out, or use pretrain_t5.py",
    },
)


@dataclass(frozen=True, kw_only=True)
class T5Config(FamilyConfig):
    """Encoder, decoder, and the spans between them; a size of 0 is derived when the whole Config is made."""

    IDENTITY: ClassVar = (
        "enc_layers",
        "dec_layers",
        "position_embedding_type",
        "relative_attention_num_buckets",
        "relative_attention_max_distance",
    )
    REFITTED: ClassVar = ("relative_attention_max_distance",)
    NO_IDENTITY: ClassVar = ("num_layers",)  # the numbers of layers of the sides stand for it

    enc_seq_length: int = _length(
        256, "tokens of the encoder's inputs, with sentinels and end", minimum=1, aliases=("--encoder-seq-length",)
    )
    dec_seq_length: int = _length(
        0,
        "tokens of the decoder's targets; more than the longest target pads, less is an error, but cuts the targets of "
        "a set in three files",
        minimum=1,
        shown_default="the longest target over --denoisers; with a set in three files --enc-seq-length",
        aliases=("--decoder-seq-length",),
    )
    enc_layers: int = _layers(
        0, "encoder layers", minimum=1, shown_default="num-layers", aliases=("--encoder-num-layers",)
    )
    dec_layers: int = _layers(
        0, "decoder layers", minimum=1, shown_default="num-layers", aliases=("--decoder-num-layers",)
    )
    position_embedding_type: str = _relative(
        "relative",
        "relative: a bias on attention scores, RMS norms (T5); learned: a table of positions, layer norms (CPM)",
        choices=("relative", "learned"),
    )
    relative_attention_num_buckets: int = _relative(32, "rows of a relative bias table; an even number", minimum=4)
    relative_attention_max_distance: int = _relative(
        128, "distance from which on all share a row of the relative bias table", minimum=1
    )
    noise_density: float = _option(0.15, "share of the text that is masked", above=0, below=1)
    mean_span_length: float = _option(3.0, "mean length of a masked span in tokens", minimum=1)
    denoisers: str = _option(
        "R",
        "kinds of samples and their weights, as R, R,X,S or R:2,X:1,S:1: R masks as the two flags say, X much more, S "
        "has a prefix predict the rest (UL2); with several kinds inputs start with a token that names theirs",
    )
    vocab_extra_ids: int = _option(
        100, "sentinels that are appended to the vocabulary of a tokenizer that has none", minimum=0
    )
    pipeline_split_rank: int = _option(
        0,
        "first pipeline stage that holds decoder layers; those before it hold encoder layers only; 0: by cost",
        minimum=0,
        aliases=("--pipeline-model-parallel-split-rank",),
    )

    @property
    def kinds(self) -> tuple[spans.Denoiser, ...]:
        """The denoisers; ValueError where the text cannot be read."""
        return spans.parse_denoisers(self.denoisers, self.noise_density, self.mean_span_length)

    @property
    def raw_length(self) -> int:
        """Tokens of text that become one sample; ValueError where no text has inputs of ``enc_seq_length``."""
        return spans.raw_length(self.enc_seq_length, self.kinds)

    @property
    def longest_target(self) -> int:
        """Tokens that the decoder needs: the longest target over the denoisers."""
        return spans.longest_target(self.raw_length, self.kinds)

    @property
    def most_spans(self) -> int:
        """Masked spans that a sample can have: the sentinels that its tokens must have."""
        return spans.most_spans(self.raw_length, self.kinds)

    @property
    def has_relative_positions(self) -> bool:
        return self.position_embedding_type == "relative"

    @property
    def summary(self) -> str:
        return f"{self.position_embedding_type} positions"

    @property
    def has_max_positions(self) -> bool:
        return not self.has_relative_positions

    def has_segments(self, reset_attention_mask: bool) -> bool:
        """Return whether batches carry segments: documents are kept apart, or inputs are padded.

        The inputs of a single kind fill ``enc_seq_length`` exactly; those of several kinds differ in length.
        """
        return reset_attention_mask or spans.has_modes(self.kinds)

    def resolved(self, model: ModelConfig, data: DataConfig) -> T5Config:
        """Return this section with the numbers that follow from others; what cannot be computed stays 0.

        The targets of a set in three files have no longest one.
        """
        longest = self.dec_seq_length
        if not longest:
            try:
                from_sets = self.enc_seq_length if data.flag_of_set else 0
                longest = max(from_sets, self.longest_target if data.cuts_spans else 0)
            except ValueError:  # told by t5_checks
                longest = 0
        return replace(
            self,
            enc_layers=self.enc_layers or model.num_layers,
            dec_layers=self.dec_layers or model.num_layers,
            dec_seq_length=longest,
        )

    def problems(self) -> Iterator[str]:
        """Yield what cannot be, looking at this section alone."""
        buckets = self.relative_attention_num_buckets
        if buckets % 2:
            yield (
                "--relative-attention-num-buckets must be even, got "
                f"{buckets}: half of the rows are for keys behind. Use {buckets - 1} or {buckets + 1}"
            )
        if self.has_relative_positions and self.relative_attention_max_distance <= buckets // 2:
            yield (
                "--relative-attention-max-distance must exceed half of --relative-attention-num-buckets, got "
                f"{self.relative_attention_max_distance} and {buckets}: shorter distances have a row each. "
                f"Use {buckets // 2 + 1} or more"
            )
