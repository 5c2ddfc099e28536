"""The decoders that ``--model`` accepts: registered families and Hugging Face model types. Does not import torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.decoder import ARCHITECTURE
from megatron.config.model import ModelConfig
from megatron.models.registry import FAMILIES, huggingface_formats

MIN_NAME_SIMILARITY = 0.6
"""Minimum similarity between an unknown name and the name suggested in the error message."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A value of ``--model``.

    Args:
        name: the family or model type.
        family: the family that implements it.
        settings: values of the fields listed in ``decoder.ARCHITECTURE``, by field name.
        fixed: the subset of ``settings`` that all models of a model type share; empty for a family.
        required_fields: names of the size settings that a model of the type requires; they have no default.
    """

    name: str
    family: str
    settings: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    required_fields: tuple[str, ...] = ()

    @property
    def is_family(self) -> bool:
        return self.name == self.family


def decoder_families() -> list[str]:
    """Return the names of the decoder families."""
    return [name for name, family in FAMILIES.items() if family.model_type == "decoder"]


def list_model_types() -> dict[str, Architecture]:
    """Return the Hugging Face model types that are not families, by name."""
    by_name = {entry.name: entry for family in decoder_families() for entry in _iter_model_types(family)}
    return {name: entry for name, entry in by_name.items() if name not in FAMILIES}


def find_architecture(name: str) -> Architecture | None:
    """Return the architecture ``name``, or None if it is unknown."""
    if name in FAMILIES:
        return _family_architecture(name) if name in decoder_families() else None
    return list_model_types().get(name)


def unknown_model_message(name: str) -> str:
    """Return the error message for a value of ``--model`` that is not a decoder."""
    if name in FAMILIES:
        family = FAMILIES[name]
        return f"--model must name a decoder, got {name}. {family.title} is trained by {family.program}"
    type_names, known_names = [*list_model_types()], [*decoder_families(), *list_model_types()]
    matches = difflib.get_close_matches(name.lower(), known_names, n=1, cutoff=MIN_NAME_SIMILARITY)
    suggestion = f"; did you mean {matches[0]}?" if matches else "."
    return (
        f"--model must be a family ({', '.join(decoder_families())}) or a Hugging Face model type "
        f"({', '.join(type_names)}), got {name!r}{suggestion}"
    )


def _family_architecture(name: str) -> Architecture:
    defaults = FAMILIES[name].config.DEFAULTS
    return Architecture(
        name=name, family=name, settings={**_default_settings(), **_select_architecture_fields(defaults)}
    )


def _iter_model_types(family: str) -> Iterator[Architecture]:
    """Yield the model types of a family with their settings."""
    for hf_format in huggingface_formats(family):
        if hf_format.architecture is None:
            continue
        settings = {**_family_architecture(family).settings, **_select_architecture_fields(hf_format.architecture())}
        for name in hf_format.model_types:
            yield Architecture(
                name=name,
                family=family,
                settings=settings,
                fixed=hf_format.fixed,
                required_fields=hf_format.required_fields,
            )


def _default_settings() -> dict[str, Any]:
    return {name: ModelConfig.__dataclass_fields__[name].default for name in ARCHITECTURE}


def _select_architecture_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in ARCHITECTURE}
