"""Source: the settings that a checkpoint or Hugging Face folder brings to a run."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.models.registry import FAMILIES, is_common_decoder

OF_WEIGHTS = ("max_position_embeddings", "layernorm_epsilon", "apply_residual_connection_post_layernorm")
"""Fields of the model with which weights were trained, beside those that they must share."""


@dataclass(frozen=True)
class Source:
    """What a folder says of its model.

    Args:
        place: the file that says it.
        stated: the fields that it says; of a run of an earlier version fewer than the model has.
        kept: field -> value of the settings that a continued run keeps (``config.changed_defaults``).
        optimizer: field -> value of the optimizer section of a run; empty for a Hugging Face folder.
    """

    place: Path | str
    config: Config
    stated: Container[str]
    kept: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    def sizes(self) -> dict[str, Any]:
        """Return field -> value of what the source brings."""
        flat = {**vars(self.config.model), **vars(self.config.own)}
        names = dict.fromkeys([*self.config.identity(), *OF_WEIGHTS])
        return {name: flat[name] for name in names if name in flat and name in self.stated}


def require_family(family: str, wanted: str, said: str, model: str) -> None:
    if model and family != wanted and FAMILIES[family].kind == "decoder":
        raise CheckpointError(
            f"{said} is {FAMILIES[family].title}, and --model {model} selects {FAMILIES[wanted].title}. Use --model "
            f"{family}, or name another folder"
        )
    if family != wanted and not (is_common_decoder(family) and is_common_decoder(wanted)):
        raise CheckpointError(
            f"{said} is {FAMILIES[family].title}, and this program trains {FAMILIES[wanted].title}. Use "
            f"{FAMILIES[family].command}, or name another folder with --load"
        )
