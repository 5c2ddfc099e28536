"""``--sequence-parallel`` acts on models whose layers were built for it, and on no others."""

from __future__ import annotations

import torch

from megatron.errors import ConfigError


def check_sequence_is_cut(module: torch.nn.Module, is_asked_for: bool) -> None:
    """Check that the layers of ``module``, a model or a stage, cut the sequence as the flag says.

    Raises:
        ConfigError: they do although nobody asked for it, or the other way round.
    """
    if any(map(_cuts, module.modules())) == is_asked_for:
        return
    if is_asked_for:
        raise ConfigError(
            f"--sequence-parallel acts on layers that are built for it, got none in {type(module).__name__}. Build it "
            "with megatron.model.Place(group, streams, sequence_parallel=True), or leave the flag out"
        )
    raise ConfigError(
        f"layers of {type(module).__name__} are built with sequence_parallel=True, got no --sequence-parallel. "
        "Give the flag, or build them without"
    )


def _cuts(module: torch.nn.Module) -> bool:
    place = getattr(module, "place", None)
    return bool(getattr(module, "sequence_parallel", False) or getattr(place, "sequence_parallel", False))
