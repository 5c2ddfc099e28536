"""Checks of T5 that need more than its own section: heights, spans, positions, the seam, flags that could not act."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.config import Config

RELATIVE = ("relative_attention_num_buckets", "relative_attention_max_distance")
"""Fields that act on relative positions only."""
SHORT_SPANS = ("noise_density", "mean_span_length")
"""Fields that act on the denoiser R only."""
SPANS = (*SHORT_SPANS, "denoisers")
"""Fields that act where spans are cut out when a text is read."""


def problems(config: Config) -> Iterator[str]:
    """Yield what cannot be, and what was given and cannot act."""
    yield from _layer_problems(config)
    if config.data.cuts_spans:
        yield from _span_problems(config)
    for prefix, flag in list(config.data.flag_of_set.items())[:1]:
        yield from _fixed_span_problems(config, f"{flag} {prefix}, a set in three files whose spans are fixed")
    if config.t5.has_relative_positions:
        yield from _relative_problems(config)
    else:
        yield from _learned_problems(config)
    if config.t5.pipeline_split_rank and config.parallel.has_pipeline:
        yield from _seam_problems(config)
    elif "pipeline_split_rank" in config.given and not config.parallel.has_pipeline:
        yield (
            "--pipeline-split-rank acts on a pipeline only, got --pipe-parallel-size "
            f"{config.parallel.pipe_parallel_size}. Leave it out, or use --pipe-parallel-size 2 or more"
        )


def notes(config: Config) -> Iterator[str]:
    """Yield what comes from defaults, cannot act, and does no harm."""
    is_default = "pipeline_split_rank" not in config.given
    if config.t5.pipeline_split_rank and is_default and not config.parallel.has_pipeline:
        yield "--pipeline-split-rank in the defaults has no effect without a pipeline"


def _layer_problems(config: Config) -> Iterator[str]:
    t5 = config.t5
    if min(t5.enc_layers, t5.dec_layers) < 1:
        yield (
            f"each side of a T5 must hold a layer, got {t5.enc_layers} in the encoder and {t5.dec_layers} in the "
            "decoder. Raise --num-layers, or set --enc-layers and --dec-layers"
        )
    if {"num_layers", "enc_layers", "dec_layers"} <= set(config.given):
        yield (
            f"--num-layers is for a side without a number of its own, got --num-layers {config.model.num_layers}, "
            f"--enc-layers {t5.enc_layers} and --dec-layers {t5.dec_layers}. Leave one of the three out"
        )


def _span_problems(config: Config) -> Iterator[str]:
    t5, named = config.t5, _flags(config, SHORT_SPANS)
    if named and "R" not in t5.denoisers:
        yield f"{named} acts on the denoiser R only, got --denoisers {t5.denoisers}. Leave it out, or add R"
    try:
        raw, longest = t5.raw_length, t5.longest_target
    except ValueError as error:
        yield str(error).removesuffix(".")
        return
    if 0 < t5.dec_seq_length < longest:
        yield (
            f"--dec-seq-length must be at least {longest}, the longest target of {raw} tokens of text, got "
            f"{t5.dec_seq_length} with --enc-seq-length {t5.enc_seq_length}, --noise-density {t5.noise_density:g}, "
            f"--mean-span-length {t5.mean_span_length:g}, --denoisers {t5.denoisers}. "
            f"Leave it out, or raise it to {longest} or more (more pads)"
        )


def _fixed_span_problems(config: Config, fixed: str) -> Iterator[str]:
    """Yield what ``fixed``, a set in three files, cannot have: its spans are cut, and no target is too long for it."""
    t5, named = config.t5, _flags(config, SPANS)
    if named and not config.data.cuts_spans:
        yield (
            f"{named} acts where spans are cut out when a text is read, got {fixed}. Leave it out, or give ordinary "
            "token files"
        )
    try:
        has_several = len(t5.kinds) > 1
    except ValueError as error:
        yield str(error).removesuffix(".")
    else:
        if has_several and ("denoisers" not in config.given or config.data.cuts_spans):
            got, cure = f"{t5.denoisers} in the defaults", "Take it out of them"
            if "denoisers" in config.given:
                got, cure = t5.denoisers, "Leave it out"
            yield f"--denoisers must be one kind for {fixed}, got {got}. {cure}, or give ordinary token files"
    if t5.enc_seq_length < 2:
        yield f"--enc-seq-length must be at least 2, a token and the end, got {t5.enc_seq_length}. Raise it"


def _relative_problems(config: Config) -> Iterator[str]:
    positions = config.model.max_position_embeddings
    if positions:
        yield (
            f"--max-position-embeddings acts on learned positions only, got {positions} and --position-embedding-type "
            "relative. Leave it out, or use --position-embedding-type learned"
        )
    if "init_method_std" in config.given:
        yield (
            "--init-method-std acts with --position-embedding-type learned only: the relative variant starts with the "
            "deviations of Hugging Face's T5. Leave it out"
        )


def _learned_problems(config: Config) -> Iterator[str]:
    named = _flags(config, RELATIVE)
    if named:
        yield f"{named} acts with --position-embedding-type relative only, got learned. Leave it out"
    positions = config.model.max_position_embeddings
    lengths = {"--enc-seq-length": config.t5.enc_seq_length, "--dec-seq-length": config.t5.dec_seq_length}
    for flag, length in lengths.items():
        if length > positions:
            yield (
                f"{flag} must not exceed --max-position-embeddings, got {length} and {positions}. "
                "Raise --max-position-embeddings, or shorten --enc-seq-length"
            )


def _seam_problems(config: Config) -> Iterator[str]:
    t5, parallel = config.t5, config.parallel
    rank, p = t5.pipeline_split_rank, parallel.num_stages
    if parallel.chunks > 1:
        yield (
            f"--pipeline-split-rank needs one chunk on each stage, got {rank} and {parallel.chunks} chunks: each stage "
            "comes again after the last. Leave one of the two out"
        )
    if parallel.partition_method != "balanced":
        yield (
            "--pipeline-split-rank acts with --partition-method balanced only, got --partition-method "
            f"{parallel.partition_method}. Leave one of the two out"
        )
    if rank >= p:
        ranks = "1" if p == 2 else f"1 to {p - 1}"
        yield f"--pipeline-split-rank must be {ranks} with --pipe-parallel-size {p}, got {rank}. Use 0 to cut by cost"
        return
    for side, layers, stages in (("encoder", t5.enc_layers, rank), ("decoder", t5.dec_layers, p - rank)):
        if layers < stages:
            yield (
                f"--pipeline-split-rank {rank} leaves the {side} {stages} of {p} stages, which must hold a layer each, "
                f"got --{side[:3]}-layers {layers}. Move the seam, use 0 to cut by cost, or give the {side} more layers"
            )


def _flags(config: Config, names: tuple[str, ...]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if name in config.given)
