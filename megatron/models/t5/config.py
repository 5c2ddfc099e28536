"""T5Config, its checks, the order of T5's units, and FAMILY."""

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

# The settings of T5: lengths and layers of both sides, positions, spans, and the pipeline split.

_t5_option = partial(option, elsewhere="it is supported in T5 only; use pretrain_t5.py, or remove it")
_length_option = partial(
    option, elsewhere="it is supported in encoder-decoder models only; use pretrain_t5.py, or --seq-length"
)
_layers_option = partial(
    option, elsewhere="it is supported in encoder-decoder models only; use pretrain_t5.py, or --num-layers"
)

RELATIVE_FIELDS = ("relative_attention_num_buckets", "relative_attention_max_distance")
"""Fields that only affect relative positions."""
R_DENOISER_FIELDS = ("noise_density", "mean_span_length")
"""Fields that only affect the denoiser R."""
SPAN_FIELDS = (*R_DENOISER_FIELDS, "denoisers")
"""Fields of span corruption. They have no effect on CPM's three-file sets, whose spans are fixed."""


@dataclass(frozen=True, kw_only=True)
class T5Config(FamilyConfig):
    """Settings of encoder, decoder and spans; sizes of 0 are derived from other settings in ``resolved``."""

    KIND: ClassVar = "encoder-decoder"
    ADVICE: ClassVar = {
        "eval_tasks": "tasks score continuations with a decoder-only model, which T5 is not; remove it",
        "eval_tasks_interval": "tasks score continuations with a decoder-only model, which T5 is not; remove it",
        "seq_length": "T5 has two lengths; use --enc-seq-length and --dec-seq-length",
        "apply_residual_connection_post_layernorm": "T5's residual connections start before the norms; remove it",
        "packing": "T5's texts are windows of the concatenated documents; remove it",
        "fim_rate": "T5 already predicts masked spans; remove it",
        "fim_spm_rate": "T5 already predicts masked spans; remove it",
        "reset_position_ids": "T5 separates documents with --reset-attention-mask only; use that flag",
        "eod_mask_loss": "T5's targets contain ends of documents only in masked spans; remove it",
        "normalization": "it follows from --position-embedding-type, RMSNorm with relative and LayerNorm with learned "
        "positions; remove it",
        "mask_prob": "use --noise-density",
        "short_seq_prob": "every T5 sample has the same text length; remove it",
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
    NO_IDENTITY: ClassVar = ("num_layers",)  # replaced by the numbers of layers of both sides
    SIDES: ClassVar = ("enc_layers", "dec_layers")
    READS_SPAN_FILES: ClassVar = True

    enc_seq_length: int = _length_option(
        256,
        "number of encoder tokens, including sentinels and the end token",
        minimum=1,
        aliases=("--encoder-seq-length",),
        short="encoder tokens",
    )
    dec_seq_length: int = _length_option(
        0,
        "number of decoder tokens; shorter targets are padded, and a value below the longest target is an error, "
        "except for a three-file set, whose targets are truncated",
        minimum=1,
        shown_default="the longest target over --denoisers; --enc-seq-length with a three-file set",
        aliases=("--decoder-seq-length",),
    )
    enc_layers: int = _layers_option(
        0, "number of encoder layers", minimum=1, shown_default="num-layers", aliases=("--encoder-num-layers",)
    )
    dec_layers: int = _layers_option(
        0, "number of decoder layers", minimum=1, shown_default="num-layers", aliases=("--decoder-num-layers",)
    )
    relative_attention_num_buckets: int = _t5_option(
        32, "number of buckets of the relative position bias; even", minimum=4
    )
    relative_attention_max_distance: int = _t5_option(
        128, "distance at and above which all positions share a bucket of the relative position bias", minimum=1
    )
    noise_density: float = _t5_option(
        0.15, "fraction of the text that is masked", above=0, below=1, short="fraction that is masked"
    )
    mean_span_length: float = _t5_option(3.0, "mean length of a masked span in tokens", minimum=1)
    denoisers: str = _t5_option(
        "R",
        "denoising tasks of UL2 with weights, such as R or R,X,S or R:2,X:1,S:1: R masks by the two flags above, X "
        "masks much more, S predicts the continuation of a prefix; with several tasks each input starts with the "
        "token of its task",
        short="denoising tasks, such as R,X,S",
    )
    vocab_extra_ids: int = _t5_option(
        100, "number of sentinels added to the vocabulary of a tokenizer without sentinels", minimum=0
    )
    pipeline_split_rank: int = _t5_option(
        0,
        "first pipeline stage with decoder layers; earlier stages have encoder layers only; 0: split by cost",
        minimum=0,
        aliases=("--pipeline-model-parallel-split-rank",),
    )

    @property
    def parsed_denoisers(self) -> tuple[spans.Denoiser, ...]:
        """The denoisers parsed from ``denoisers``.

        Raises:
            ValueError: the flag is malformed.
        """
        return spans.parse_denoisers(self.denoisers, self.noise_density, self.mean_span_length)

    @property
    def raw_length(self) -> int:
        """Number of text tokens per sample, before spans are cut out.

        Raises:
            ValueError: no text length leads to inputs of ``enc_seq_length`` tokens.
        """
        return spans.raw_length(self.enc_seq_length, self.parsed_denoisers)

    @property
    def max_target_length(self) -> int:
        """Minimum ``dec_seq_length``: the longest target over the denoisers."""
        return spans.max_target_length(self.raw_length, self.parsed_denoisers)

    @property
    def max_num_spans(self) -> int:
        """Maximum masked spans per sample, which is the number of sentinels required."""
        return spans.max_num_spans(self.raw_length, self.parsed_denoisers)

    def summary(self, model: ModelConfig) -> str:
        return f"{'relative' if model.has_relative_positions else 'learned'} positions"

    def has_max_positions(self, model: ModelConfig) -> bool:
        return not model.has_relative_positions

    def sequence_lengths(self, batch: BatchConfig) -> tuple[int, ...]:
        return self.enc_seq_length, self.dec_seq_length

    def text_length(self, batch: BatchConfig) -> int:
        return self.raw_length

    def has_segments(self, reset_attention_mask: bool) -> bool:
        """Return True if batches have segments: documents are kept apart, or inputs are padded.

        With one denoiser, inputs fill ``enc_seq_length`` exactly; with several, their lengths differ.
        """
        return reset_attention_mask or spans.has_modes(self.parsed_denoisers)

    def resolved(self, model: ModelConfig, data: DataConfig) -> T5Config:
        """Copy this section with derived sizes; sizes that cannot be computed stay 0.

        The longest target is unknown for CPM's three-file sets; ``enc_seq_length`` is used for them.
        """
        dec_seq_length = self.dec_seq_length
        if not dec_seq_length:
            try:
                set_length = self.enc_seq_length if data.flag_of_cpm_set else 0
                dec_seq_length = max(set_length, self.max_target_length if data.has_dynamic_spans else 0)
            except ValueError:  # reported by check()
                dec_seq_length = 0
        return replace(
            self,
            enc_layers=self.enc_layers or model.num_layers,
            dec_layers=self.dec_layers or model.num_layers,
            dec_seq_length=dec_seq_length,
        )

    def problems(self) -> Iterator[str]:
        """Yield problems within this section."""
        buckets = self.relative_attention_num_buckets
        if buckets % 2:
            yield (
                "--relative-attention-num-buckets must be even, got "
                f"{buckets}: half of the buckets are for keys after the query. Use {buckets - 1} or {buckets + 1}"
            )

    def model_problems(self, config: Config) -> Iterator[str]:
        """Yield problems with the position embedding: an unsupported type, or unused rows in the bias table."""
        positions, buckets = config.model.position_embedding_type, self.relative_attention_num_buckets
        if positions not in (RELATIVE, LEARNED):
            yield (
                f"--position-embedding-type must be relative (T5) or learned (CPM's T5), got {positions}. "
                "Encoder-decoder models support no other types. Use relative or learned"
            )
        if positions == RELATIVE and self.relative_attention_max_distance <= buckets // 2:
            yield (
                "--relative-attention-max-distance must exceed half of --relative-attention-num-buckets, got "
                f"{self.relative_attention_max_distance} and {buckets}: each shorter distance has its own bucket. "
                f"Use {buckets // 2 + 1} or more"
            )

    def check(self, config: Config) -> Iterator[str]:
        yield from self.model_problems(config)
        yield from self._layer_problems(config)
        if config.data.has_dynamic_spans:
            yield from self._span_problems(config)
        for prefix, flag in list(config.data.flag_of_cpm_set.items())[:1]:
            yield from self._fixed_span_problems(config, f"{flag} {prefix}, a three-file set with fixed spans")
        if config.model.has_relative_positions:
            yield from self._relative_problems(config)
        else:
            yield from self._learned_problems(config)
        if self.pipeline_split_rank and config.parallel.has_pipeline:
            yield from self._split_rank_problems(config)
        elif "pipeline_split_rank" in config.explicit_fields and not config.parallel.has_pipeline:
            yield (
                "--pipeline-split-rank has no effect without a pipeline, got --pipe-parallel-size "
                f"{config.parallel.pipe_parallel_size}. Remove it, or use --pipe-parallel-size 2 or more"
            )

    def notes(self, config: Config) -> Iterator[str]:
        is_default = "pipeline_split_rank" not in config.explicit_fields
        if self.pipeline_split_rank and is_default and not config.parallel.has_pipeline:
            yield "--pipeline-split-rank in the defaults has no effect without a pipeline"

    def _layer_problems(self, config: Config) -> Iterator[str]:
        if min(self.enc_layers, self.dec_layers) < 1:
            yield (
                f"each side of a T5 must have a layer, got {self.enc_layers} in the encoder and {self.dec_layers} in "
                "the decoder. Raise --num-layers, or set --enc-layers and --dec-layers"
            )
        if {"num_layers", "enc_layers", "dec_layers"} <= set(config.explicit_fields):
            yield (
                "--num-layers has no effect with both --enc-layers and --dec-layers, got --num-layers "
                f"{config.model.num_layers}, --enc-layers {self.enc_layers} and --dec-layers {self.dec_layers}. "
                "Remove one of the three"
            )

    def _span_problems(self, config: Config) -> Iterator[str]:
        flags = _given_flags(config, R_DENOISER_FIELDS)
        if flags and "R" not in self.denoisers:
            yield f"{flags} has no effect without the denoiser R, got --denoisers {self.denoisers}. Remove it, or add R"
        try:
            text_length, max_target = self.raw_length, self.max_target_length
        except ValueError as error:
            yield str(error).removesuffix(".")
            return
        if 0 < self.dec_seq_length < max_target:
            yield (
                f"--dec-seq-length must be at least {max_target}, the longest target of {text_length} tokens of text, "
                f"got {self.dec_seq_length} with --enc-seq-length {self.enc_seq_length}, --noise-density "
                f"{self.noise_density:g}, --mean-span-length {self.mean_span_length:g}, --denoisers {self.denoisers}. "
                f"Remove it, or raise it to {max_target} or more, which adds padding"
            )

    def _fixed_span_problems(self, config: Config, set_description: str) -> Iterator[str]:
        """Yield a problem for each setting that conflicts with fixed spans.

        Args:
            set_description: description of the three-file set that fixes the spans, for messages.
        """
        flags = _given_flags(config, SPAN_FIELDS)
        if flags and not config.data.has_dynamic_spans:
            yield (
                f"{flags} has no effect on spans that are fixed in the data, got {set_description}. Remove it, or use "
                "ordinary token files"
            )
        try:
            has_several = len(self.parsed_denoisers) > 1
        except ValueError as error:
            yield str(error).removesuffix(".")
        else:
            if has_several and ("denoisers" not in config.explicit_fields or config.data.has_dynamic_spans):
                value, remedy = f"{self.denoisers} in the defaults", "Remove it from the defaults"
                if "denoisers" in config.explicit_fields:
                    value, remedy = self.denoisers, "Remove it"
                yield (
                    f"--denoisers must be one denoiser for {set_description}, got {value}. {remedy}, or use ordinary "
                    "token files"
                )
        if self.enc_seq_length < 2:
            yield (
                "--enc-seq-length must be at least 2 (one token and the end token), "
                f"got {self.enc_seq_length}. Raise it"
            )

    def _relative_problems(self, config: Config) -> Iterator[str]:
        positions = config.model.max_position_embeddings
        if positions:
            yield (
                f"--max-position-embeddings has no effect on relative positions, got {positions} and "
                "--position-embedding-type relative. Remove it, or use --position-embedding-type learned"
            )

    def _learned_problems(self, config: Config) -> Iterator[str]:
        flags = _given_flags(config, RELATIVE_FIELDS)
        if flags:
            yield f"{flags} has no effect without --position-embedding-type relative, got learned. Remove it"
        positions = config.model.max_position_embeddings
        lengths = {"--enc-seq-length": self.enc_seq_length, "--dec-seq-length": self.dec_seq_length}
        for flag, length in lengths.items():
            if length > positions:
                yield (
                    f"{flag} must not exceed --max-position-embeddings, got {length} and {positions}. "
                    "Raise --max-position-embeddings, or shorten --enc-seq-length"
                )

    def _split_rank_problems(self, config: Config) -> Iterator[str]:
        parallel = config.parallel
        split_rank, num_stages = self.pipeline_split_rank, parallel.num_stages
        if parallel.chunks > 1:
            yield (
                f"--pipeline-split-rank requires one chunk per stage, got {split_rank} and {parallel.chunks} chunks. "
                "Remove --pipeline-split-rank, or use one chunk per stage"
            )
        if parallel.partition_method != "balanced":
            yield (
                "--pipeline-split-rank has no effect without --partition-method balanced, got --partition-method "
                f"{parallel.partition_method}. Remove one of the two"
            )
        if split_rank >= num_stages:
            valid_ranks = "1" if num_stages == 2 else f"1 to {num_stages - 1}"
            yield (
                f"--pipeline-split-rank must be {valid_ranks} with --pipe-parallel-size {num_stages}, got "
                f"{split_rank}. Use 0 to split by cost"
            )
            return
        for side, num_layers, num_side_stages in (
            ("encoder", self.enc_layers, split_rank),
            ("decoder", self.dec_layers, num_stages - split_rank),
        ):
            if num_layers < num_side_stages:
                yield (
                    f"--pipeline-split-rank {split_rank} assigns {num_side_stages} of {num_stages} stages to the "
                    f"{side}, and each stage needs a layer, got --{side[:3]}-layers {num_layers}. Change "
                    f"--pipeline-split-rank, use 0 to split by cost, or add {side} layers"
                )


def _given_flags(config: Config, names: tuple[str, ...]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if name in config.explicit_fields)


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
    """Unit indices in the list that is split into stages: embedding, layers and norm per side, then the head.

    The boundary between encoder and decoder is between ``enc_norm`` and ``dec_embedding``.
    """

    enc_embedding: int
    enc_layers: range
    enc_norm: int
    dec_embedding: int
    dec_layers: range
    dec_norm: int
    head: int


def t5_units(enc_layers: int, dec_layers: int) -> T5LayerOrder:
    """Return the unit indices for this many layers per side."""
    encoder, dec_embedding = range(1, 1 + enc_layers), enc_layers + 2
    decoder = range(dec_embedding + 1, dec_embedding + 1 + dec_layers)
    return T5LayerOrder(0, encoder, encoder.stop, dec_embedding, decoder, decoder.stop, decoder.stop + 1)
