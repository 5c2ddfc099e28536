"""Checks of --sequence-parallel, which cuts what lies between the tensor-parallel products along the sequence."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.config import Config


def sequence_parallel_problems(config: Config) -> Iterator[str]:
    """Yield what it cannot go with, and what then could not act."""
    parallel = config.parallel
    if not parallel.sequence_parallel:
        return
    t = parallel.model_parallel_size
    if t == 1:
        yield (
            "--sequence-parallel cuts over the tensor ranks, got --model-parallel-size 1. Leave it out, or use "
            "--model-parallel-size 2 or more"
        )
    if parallel.partition_activations and parallel.checkpoint_activations:
        yield (
            "with --sequence-parallel each tensor rank has 1/t of the inputs of layers anyway, got "
            "--partition-activations too. Leave --partition-activations out"
        )
    flags = ("--enc-seq-length", "--dec-seq-length") if config.own.is_encoder_decoder else ("--seq-length",)
    for flag, length in zip(flags, config.sequence_lengths, strict=True):
        if length % t:
            yield (
                f"with --sequence-parallel {flag} must be a multiple of --model-parallel-size, got {length} and {t} "
                f"({length} / {t} = {length / t:g}). Use {flag} {-(-length // t) * t}, or leave --sequence-parallel out"
            )
