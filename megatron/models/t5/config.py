"""T5Config, its checks, order of units, FAMILY."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

from megatron.config.batch import BatchConfig
from megatron.config.config import Config
from megatron.config.data import DataConfig
from megatron.config.decoder import LEARNED, RELATIVE
from megatron.config.family import FamilyConfig, ModelFamily
from megatron.config.model import ModelConfig
from megatron.config.option import option
from megatron.models.t5 import spans

# What T5 adds: two lengths, two heights, positions, spans, and where the pipeline's seam is; its checks and line.

_option = partial(option, elsewhere="it is for T5; use pretrain_t5.py, or leave it out")
_length = partial(option, elsewhere="it is for encoder-decoders; use pretrain_t5.py, or --seq-length here")
_layers = partial(option, elsewhere="it is for encoder-decoders; use pretrain_t5.py, or --num-layers here")

OF_RELATIVE = ("relative_attention_num_buckets", "relative_attention_max_distance")
"""Fields that act on relative positions only."""
SHORT_SPANS = ("noise_density", "mean_span_length")
"""Fields that act on the denoiser R only."""
SPANS = (*SHORT_SPANS, "denoisers")
"""Fields that act where spans are cut out when a text is read."""


@dataclass(frozen=True, kw_only=True)
class T5Config(FamilyConfig):
    """Encoder, decoder, and the spans between them; a size of 0 is derived when the whole Config is made."""

    KIND: ClassVar = "encoder-decoder"
    ADVICE: ClassVar = {
        "eval_tasks": "tasks score how a text goes on, for which T5 is not made; leave it out",
        "eval_tasks_interval": "tasks score how a text goes on, for which T5 is not made; leave it out",
        "seq_length": "T5 has two lengths; use --enc-seq-length and --dec-seq-length",
        "apply_residual_connection_post_layernorm": "T5 adds to the input of a layer's parts; leave it out",
        "packing": "T5 cuts its texts out of documents end to end; leave it out",
        "fim_rate": "T5 fills gaps anyway; leave it out",
        "fim_spm_rate": "T5 fills gaps anyway; leave it out",
        "reset_position_ids": "T5 keeps documents apart by --reset-attention-mask alone; use that",
        "eod_mask_loss": "T5 learns the one end of its targets, and no document's end but those in masked spans; leave "
        "it out",
        "normalization": "--position-embedding-type relative has RMS norms, learned has layer norms; leave it out",
        "mask_prob": "use --noise-density",
        "short_seq_prob": "every sample has the same length of text; leave it out",
    }
    DEFAULTS: ClassVar = {"position_embedding_type": RELATIVE}
    IDENTITY: ClassVar = (
        "enc_layers",
        "dec_layers",
        "position_embedding_type",
        "relative_attention_num_buckets",
        "relative_attention_max_distance",
    )
    REFITTED: ClassVar = ("relative_attention_max_distance",)
    NO_IDENTITY: ClassVar = ("num_layers",)  # the numbers of layers of the sides stand for it
    SIDES: ClassVar = ("enc_layers", "dec_layers")
    READS_SPAN_FILES: ClassVar = True

    enc_seq_length: int = _length(
        256,
        "number of encoder tokens, including sentinels and the end token",
        minimum=1,
        aliases=("--encoder-seq-length",),
        short="encoder tokens",
    )
    dec_seq_length: int = _length(
        0,
        "number of decoder tokens; larger than the longest target pads, smaller is an error, except for a data set "
        "in three files, whose targets are truncated",
        minimum=1,
        shown_default="the longest target over --denoisers; with a set in three files --enc-seq-length",
        aliases=("--decoder-seq-length",),
    )
    enc_layers: int = _layers(
        0, "number of encoder layers", minimum=1, shown_default="num-layers", aliases=("--encoder-num-layers",)
    )
    dec_layers: int = _layers(
        0, "number of decoder layers", minimum=1, shown_default="num-layers", aliases=("--decoder-num-layers",)
    )
    relative_attention_num_buckets: int = _option(
        32, "number of buckets of the relative position bias; even", minimum=4
    )
    relative_attention_max_distance: int = _option(
        128, "distance from which on all positions share a bucket of the relative position bias", minimum=1
    )
    noise_density: float = _option(
        0.15, "fraction of the text that is masked", above=0, below=1, short="fraction that is masked"
    )
    mean_span_length: float = _option(3.0, "mean length of a masked span in tokens", minimum=1)
    denoisers: str = _option(
        "R",
        "denoising tasks of UL2 with weights, such as R or R,X,S or R:2,X:1,S:1: R masks by the two flags above, X "
        "masks much more, S predicts the continuation of a prefix; with several tasks each input starts with the "
        "token of its task",
        short="denoising tasks, such as R,X,S",
    )
    vocab_extra_ids: int = _option(
        100, "number of sentinels added to the vocabulary of a tokenizer without sentinels", minimum=0
    )
    pipeline_split_rank: int = _option(
        0,
        "first pipeline stage with decoder layers; earlier stages have encoder layers only; 0: split by cost",
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

    def summary(self, model: ModelConfig) -> str:
        return f"{'relative' if model.has_relative_positions else 'learned'} positions"

    def has_max_positions(self, model: ModelConfig) -> bool:
        return not model.has_relative_positions

    def sequence_lengths(self, batch: BatchConfig) -> tuple[int, ...]:
        return self.enc_seq_length, self.dec_seq_length

    def text_length(self, batch: BatchConfig) -> int:
        return self.raw_length

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
            except ValueError:  # told by check()
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

    def model_problems(self, config: Config) -> Iterator[str]:
        """Yield positions that a T5 has not, and a table of biases of which rows would be for no distance."""
        kind, buckets = config.model.position_embedding_type, self.relative_attention_num_buckets
        if kind not in (RELATIVE, LEARNED):
            yield (
                f"--position-embedding-type must be relative (T5) or learned (CPM's T5), got {kind}: an encoder and "
                "its decoder have no others. Use one of these"
            )
        if kind == RELATIVE and self.relative_attention_max_distance <= buckets // 2:
            yield (
                "--relative-attention-max-distance must exceed half of --relative-attention-num-buckets, got "
                f"{self.relative_attention_max_distance} and {buckets}: shorter distances have a row each. "
                f"Use {buckets // 2 + 1} or more"
            )

    def check(self, config: Config) -> Iterator[str]:
        yield from self.model_problems(config)
        yield from self._layer_problems(config)
        if config.data.cuts_spans:
            yield from self._span_problems(config)
        for prefix, flag in list(config.data.flag_of_set.items())[:1]:
            yield from self._fixed_span_problems(config, f"{flag} {prefix}, a set in three files whose spans are fixed")
        if config.model.has_relative_positions:
            yield from self._relative_problems(config)
        else:
            yield from self._learned_problems(config)
        if self.pipeline_split_rank and config.parallel.has_pipeline:
            yield from self._seam_problems(config)
        elif "pipeline_split_rank" in config.given and not config.parallel.has_pipeline:
            yield (
                "--pipeline-split-rank acts on a pipeline only, got --pipe-parallel-size "
                f"{config.parallel.pipe_parallel_size}. Leave it out, or use --pipe-parallel-size 2 or more"
            )

    def notes(self, config: Config) -> Iterator[str]:
        is_default = "pipeline_split_rank" not in config.given
        if self.pipeline_split_rank and is_default and not config.parallel.has_pipeline:
            yield "--pipeline-split-rank in the defaults has no effect without a pipeline"

    def _layer_problems(self, config: Config) -> Iterator[str]:
        if min(self.enc_layers, self.dec_layers) < 1:
            yield (
                f"each side of a T5 must hold a layer, got {self.enc_layers} in the encoder and {self.dec_layers} in "
                "the decoder. Raise --num-layers, or set --enc-layers and --dec-layers"
            )
        if {"num_layers", "enc_layers", "dec_layers"} <= set(config.given):
            yield (
                f"--num-layers is for a side without a number of its own, got --num-layers {config.model.num_layers}, "
                f"--enc-layers {self.enc_layers} and --dec-layers {self.dec_layers}. Leave one of the three out"
            )

    def _span_problems(self, config: Config) -> Iterator[str]:
        named = _flags(config, SHORT_SPANS)
        if named and "R" not in self.denoisers:
            yield f"{named} acts on the denoiser R only, got --denoisers {self.denoisers}. Leave it out, or add R"
        try:
            raw, longest = self.raw_length, self.longest_target
        except ValueError as error:
            yield str(error).removesuffix(".")
            return
        if 0 < self.dec_seq_length < longest:
            yield (
                f"--dec-seq-length must be at least {longest}, the longest target of {raw} tokens of text, got "
                f"{self.dec_seq_length} with --enc-seq-length {self.enc_seq_length}, --noise-density "
                f"{self.noise_density:g}, --mean-span-length {self.mean_span_length:g}, --denoisers {self.denoisers}. "
                f"Leave it out, or raise it to {longest} or more (more pads)"
            )

    def _fixed_span_problems(self, config: Config, fixed: str) -> Iterator[str]:
        """Yield what ``fixed``, a set in three files, cannot have: its spans are cut, no target is too long for it."""
        named = _flags(config, SPANS)
        if named and not config.data.cuts_spans:
            yield (
                f"{named} acts where spans are cut out when a text is read, got {fixed}. Leave it out, or give "
                "ordinary token files"
            )
        try:
            has_several = len(self.kinds) > 1
        except ValueError as error:
            yield str(error).removesuffix(".")
        else:
            if has_several and ("denoisers" not in config.given or config.data.cuts_spans):
                got, cure = f"{self.denoisers} in the defaults", "Take it out of them"
                if "denoisers" in config.given:
                    got, cure = self.denoisers, "Leave it out"
                yield f"--denoisers must be one kind for {fixed}, got {got}. {cure}, or give ordinary token files"
        if self.enc_seq_length < 2:
            yield f"--enc-seq-length must be at least 2, a token and the end, got {self.enc_seq_length}. Raise it"

    def _relative_problems(self, config: Config) -> Iterator[str]:
        positions = config.model.max_position_embeddings
        if positions:
            yield (
                f"--max-position-embeddings acts on learned positions only, got {positions} and "
                "--position-embedding-type relative. Leave it out, or use --position-embedding-type learned"
            )

    def _learned_problems(self, config: Config) -> Iterator[str]:
        named = _flags(config, OF_RELATIVE)
        if named:
            yield f"{named} acts with --position-embedding-type relative only, got learned. Leave it out"
        positions = config.model.max_position_embeddings
        lengths = {"--enc-seq-length": self.enc_seq_length, "--dec-seq-length": self.dec_seq_length}
        for flag, length in lengths.items():
            if length > positions:
                yield (
                    f"{flag} must not exceed --max-position-embeddings, got {length} and {positions}. "
                    "Raise --max-position-embeddings, or shorten --enc-seq-length"
                )

    def _seam_problems(self, config: Config) -> Iterator[str]:
        parallel = config.parallel
        rank, p = self.pipeline_split_rank, parallel.num_stages
        if parallel.chunks > 1:
            yield (
                f"--pipeline-split-rank needs one chunk on each stage, got {rank} and {parallel.chunks} chunks: each "
                "stage comes again after the last. Leave one of the two out"
            )
        if parallel.partition_method != "balanced":
            yield (
                "--pipeline-split-rank acts with --partition-method balanced only, got --partition-method "
                f"{parallel.partition_method}. Leave one of the two out"
            )
        if rank >= p:
            ranks = "1" if p == 2 else f"1 to {p - 1}"
            yield (
                f"--pipeline-split-rank must be {ranks} with --pipe-parallel-size {p}, got {rank}. Use 0 to cut by cost"
            )
            return
        for side, layers, stages in (("encoder", self.enc_layers, rank), ("decoder", self.dec_layers, p - rank)):
            if layers < stages:
                yield (
                    f"--pipeline-split-rank {rank} leaves the {side} {stages} of {p} stages, which must hold a layer "
                    f"each, got --{side[:3]}-layers {layers}. Move the seam, use 0 to cut by cost, or give the {side} "
                    "more layers"
                )


def _flags(config: Config, names: tuple[str, ...]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if name in config.given)


FAMILY = ModelFamily(
    name="t5",
    title="T5",
    program="pretrain_t5.py",
    config=T5Config,
    length=512,
    vocabulary=32128,
    recipe=("--attention-dropout", "0", "--hidden-dropout", "0"),
    follows={"dec_seq_length": "--dec-seq-length"},
    benchmark_flags="--activation relu",
    layer_lists={"encoder": "encoder.layers", "decoder": "decoder.layers"},
    model="megatron.models.t5.model:MODEL",
    pipeline="megatron.models.t5.pipeline:T5ModelPipe",
    costs="megatron.models.t5.cost:costs",
    data="megatron.models.t5.data:DATA",
    huggingface="megatron.models.t5.huggingface:FORMATS",
)


class T5LayerOrder(NamedTuple):
    """The number of each unit of a T5 in the list that is cut into stages: a side's embedding, layers and norm; head.

    What lies between ``enc_norm`` and ``dec_embedding`` is the seam.
    """

    enc_embedding: int
    enc_layers: range
    enc_norm: int
    dec_embedding: int
    dec_layers: range
    dec_norm: int
    head: int


def t5_units(enc_layers: int, dec_layers: int) -> T5LayerOrder:
    """Return where the units of a T5 with so many layers on each side are."""
    encoder, seam = range(1, 1 + enc_layers), enc_layers + 2
    decoder = range(seam + 1, seam + 1 + dec_layers)
    return T5LayerOrder(0, encoder, encoder.stop, seam, decoder, decoder.stop, decoder.stop + 1)
