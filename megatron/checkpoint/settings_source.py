"""Settings that a run reads from a checkpoint or Hugging Face folder (the source)."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.models.registry import FAMILIES, is_common_decoder

INHERITED_FIELDS = ("max_position_embeddings", "layernorm_epsilon", "apply_residual_connection_post_layernorm")
"""Model fields, in addition to ``Config.identity``, that are taken from the source unless the user sets them."""


@dataclass(frozen=True)
class SettingsSource:
    """Model settings in a checkpoint or Hugging Face folder.

    Args:
        path: the file with the settings.
        stated_fields: names of the fields in that file; earlier versions' files may lack model fields.
        retained: field -> value for settings that a resumed run keeps (``config.changed_defaults``).
        optimizer: field -> value of a run's optimizer section; empty for a Hugging Face folder.
        missing_features: features of the saved run's training that a continued run does not have.
    """

    path: Path | str
    config: Config
    stated_fields: Container[str]
    retained: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    missing_features: tuple[str, ...] = ()

    def model_settings(self) -> dict[str, Any]:
        """Collect the model settings that a run reads from the source, as field -> value."""
        flat = {**vars(self.config.model), **vars(self.config.family_config)}
        names = dict.fromkeys([*self.config.identity(), *INHERITED_FIELDS])
        return {name: flat[name] for name in names if name in flat and name in self.stated_fields}


def check_family(family: str, expected_family: str, subject: str, model: str) -> None:
    """Check that a model of ``family`` can be used where ``expected_family`` is needed.

    Args:
        subject: subject of the error message: the source and its model type.
        model: ``--model``; empty without the flag.

    Raises:
        CheckpointError: the families differ and are not both common decoders, or ``--model`` names another decoder.
    """
    if model and family != expected_family and FAMILIES[family].model_type == "decoder":
        raise CheckpointError(
            f"{subject} is {FAMILIES[family].title}, but --model {model} selects {FAMILIES[expected_family].title}. "
            f"Use --model {family}, or choose another folder"
        )
    if family != expected_family and not (is_common_decoder(family) and is_common_decoder(expected_family)):
        raise CheckpointError(
            f"{subject} is {FAMILIES[family].title}, but this program trains {FAMILIES[expected_family].title}. Use "
            f"{FAMILIES[family].command}, or choose another folder with --load"
        )
