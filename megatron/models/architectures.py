"""The decoders that ``--model`` accepts: registered families and Hugging Face model types. Does not import torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.decoder import ARCHITECTURE
from megatron.config.model import ModelConfig
from megatron.models.registry import FAMILIES, huggingface_formats

ALIKE = 0.6
"""Minimum similarity between an unknown name and the name suggested in the error message."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A value of ``--model``.

    Args:
        name: the family or model type.
        family: the family that implements it.
        settings: values of the fields listed in ``decoder.ARCHITECTURE``, by field name.
        fixed: the subset of ``settings`` that all models of a model type share; empty for a family.
        needs: names of the size settings that a model of the type requires; they have no default.
    """

    name: str
    family: str
    settings: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    @property
    def is_family(self) -> bool:
        return self.name == self.family


def families() -> list[str]:
    """Return the names of the decoder families."""
    return [name for name, family in FAMILIES.items() if family.kind == "decoder"]


def model_types() -> dict[str, Architecture]:
    """Return the Hugging Face model types that are not families, by name."""
    by_name = {entry.name: entry for family in families() for entry in _types_of(family)}
    return {name: entry for name, entry in by_name.items() if name not in FAMILIES}


def architecture(name: str) -> Architecture | None:
    """Return the architecture ``name``, or None if it is unknown."""
    if name in FAMILIES:
        return _of_family(name) if name in families() else None
    return model_types().get(name)


def problem_of(name: str) -> str:
    """Return the error message for a value of ``--model`` that is not a decoder."""
    if name in FAMILIES:
        family = FAMILIES[name]
        return f"--model must name a decoder, got {name}. {family.title} is trained by {family.program}"
    types, names = [*model_types()], [*families(), *model_types()]
    matches = difflib.get_close_matches(name.lower(), names, n=1, cutoff=ALIKE)
    guess = f"; did you mean {matches[0]}?" if matches else "."
    return (
        f"--model must be a family ({', '.join(families())}) or a Hugging Face model type ({', '.join(types)}), "
        f"got {name!r}{guess}"
    )


def _of_family(name: str) -> Architecture:
    defaults = FAMILIES[name].config.DEFAULTS
    return Architecture(name=name, family=name, settings={**_default_settings(), **_parts_of(defaults)})


def _types_of(family: str) -> Iterator[Architecture]:
    """Yield the model types of a family with their settings."""
    for hf_format in huggingface_formats(family):
        if hf_format.architecture is None:
            continue
        settings = {**_of_family(family).settings, **_parts_of(hf_format.architecture())}
        for name in hf_format.model_types:
            yield Architecture(
                name=name, family=family, settings=settings, fixed=hf_format.fixed, needs=hf_format.needs
            )


def _default_settings() -> dict[str, Any]:
    return {name: ModelConfig.__dataclass_fields__[name].default for name in ARCHITECTURE}


def _parts_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in ARCHITECTURE}
