"""Source: the settings that a run takes from a checkpoint or Hugging Face folder."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.models.registry import FAMILIES, is_common_decoder

OF_WEIGHTS = ("max_position_embeddings", "layernorm_epsilon", "apply_residual_connection_post_layernorm")
"""Model fields, in addition to ``Config.identity``, that are taken from the source unless the user sets them."""


@dataclass(frozen=True)
class Source:
    """The model settings of a checkpoint or Hugging Face folder.

    Args:
        place: the file with the settings.
        stated: names of the fields in that file; files of earlier versions may lack fields of the model.
        kept: field -> value of the settings that a resumed run keeps (``config.changed_defaults``).
        optimizer: field -> value of a run's optimizer section; empty for a Hugging Face folder.
    """

    place: Path | str
    config: Config
    stated: Container[str]
    kept: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    def sizes(self) -> dict[str, Any]:
        """Return field -> value of the model settings that a run takes from the source."""
        flat = {**vars(self.config.model), **vars(self.config.own)}
        names = dict.fromkeys([*self.config.identity(), *OF_WEIGHTS])
        return {name: flat[name] for name in names if name in flat and name in self.stated}


def require_family(family: str, wanted: str, said: str, model: str) -> None:
    """Check that a model of ``family`` can be used where ``wanted`` is needed.

    Args:
        said: subject of the error message: the source and its model type.
        model: value of ``--model``; empty without the flag.

    Raises:
        CheckpointError: the families differ and are not both common decoders, or ``--model`` names another decoder.
    """
    if model and family != wanted and FAMILIES[family].kind == "decoder":
        raise CheckpointError(
            f"{said} is {FAMILIES[family].title}, but --model {model} selects {FAMILIES[wanted].title}. Use --model "
            f"{family}, or choose another folder"
        )
    if family != wanted and not (is_common_decoder(family) and is_common_decoder(wanted)):
        raise CheckpointError(
            f"{said} is {FAMILIES[family].title}, but this program trains {FAMILIES[wanted].title}. Use "
            f"{FAMILIES[family].command}, or choose another folder with --load"
        )
