"""The decoders that ``--model`` names: registered families and Hugging Face model types. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.decoder import ARCHITECTURE
from megatron.config.model import ModelConfig
from megatron.models.registry import FAMILIES, huggingface_formats

ALIKE = 0.6
"""Least similarity of an unknown name to the name that the message suggests."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A value of ``--model``.

    Args:
        name: the family or model type.
        family: the family that holds it.
        settings: field -> value of ``decoder.ARCHITECTURE``.
        fixed: those of ``settings`` that every model of the type has; empty for a family.
        needs: sizes without a default that a model of the type cannot be without.
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
    """Return the families of decoders."""
    return [name for name, family in FAMILIES.items() if family.kind == "decoder"]


def model_types() -> dict[str, Architecture]:
    """Return the Hugging Face model types that are no families, by name."""
    found = {each.name: each for family in families() for each in _types_of(family)}
    return {name: each for name, each in found.items() if name not in FAMILIES}


def architecture(name: str) -> Architecture | None:
    """Return the architecture ``name``; None if there is none."""
    if name in FAMILIES:
        return _of_family(name) if name in families() else None
    return model_types().get(name)


def problem_of(name: str) -> str:
    """Return the message for a value of ``--model`` that names no decoder."""
    if name in FAMILIES:
        family = FAMILIES[name]
        return f"--model must name a decoder, got {name}. {family.title} is trained by {family.program}"
    types, known = [*model_types()], [*families(), *model_types()]
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=ALIKE)
    guess = f"; did you mean {near[0]}?" if near else "."
    return (
        f"--model must be a family ({', '.join(families())}) or a Hugging Face model type ({', '.join(types)}), "
        f"got {name!r}{guess}"
    )


def _of_family(name: str) -> Architecture:
    defaults = FAMILIES[name].config.DEFAULTS
    return Architecture(name=name, family=name, settings={**_default_settings(), **_parts_of(defaults)})


def _types_of(family: str) -> Iterator[Architecture]:
    """Yield the model types of a family with their settings."""
    for one in huggingface_formats(family):
        if one.architecture is None:
            continue
        settings = {**_of_family(family).settings, **_parts_of(one.architecture())}
        for name in one.model_types:
            yield Architecture(name=name, family=family, settings=settings, fixed=one.fixed, needs=one.needs)


def _default_settings() -> dict[str, Any]:
    return {name: ModelConfig.__dataclass_fields__[name].default for name in ARCHITECTURE}


def _parts_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in ARCHITECTURE}
