"""The families of models, a line each, and their parts by name: the one table of families. No torch.

``load(family, part)`` imports a file of the family's folder:

| part | has |
|---|---|
| cost | ``costs(config, is_on_cpu)``; no torch |
| model | ``model_args(config)``, ``<Prefix>Model(args, place)``, ``weight_init(config)``, |
| | ``example_inputs(config, words)``, of a decoder ``GENERATION`` |
| pipeline | ``<Prefix>ModelPipe``, ``layer_specs`` |
| huggingface | ``FORM`` |
| data | where samples are the family's own: ``special_tokens(tokenizer, config)``, ``random_dataset(...)`` |
| generate | of a family that generates and is no decoder |
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from megatron.config.config import SECTIONS
from megatron.config.model import ModelFamily
from megatron.models.bert.config import FAMILY as BERT
from megatron.models.gpt2.config import FAMILY as GPT2
from megatron.models.llama.config import FAMILY as LLAMA
from megatron.models.mpt.config import FAMILY as MPT
from megatron.models.t5.config import FAMILY as T5

FAMILIES: dict[str, ModelFamily] = {}
"""Name -> family, in the order of docs/flags.md."""


def register(family: ModelFamily) -> None:
    """Add a family: its flags are taken from here on, and its parts are looked for beside its section.

    Raises:
        ValueError: there is one of that name, or a section of every run has it.
    """
    if family.name in FAMILIES or family.name in SECTIONS:
        raise ValueError(f"a family needs a name of its own, got {family.name}, which is taken. Rename it")
    FAMILIES[family.name] = family


for _family in (GPT2, T5, LLAMA, MPT, BERT):
    register(_family)


def family_of(name: str) -> ModelFamily:
    """Return the family of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in FAMILIES:
        raise ValueError(f"family must be {' or '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def titles(*kinds: str) -> str:
    """Return the families of ``kinds``, of all where none are given, as messages list them."""
    return ", ".join(family.title for family in FAMILIES.values() if not kinds or family.kind in kinds)


def load(family: str, part: str) -> ModuleType:
    """Return the module with a part of a family: "cost", "model", "pipeline", "huggingface", "data", "generate".

    Raises:
        ValueError: there is no such family.
        ModuleNotFoundError: it has no such part.
    """
    return importlib.import_module(_module_of(family_of(family), part))


def has_part(family: str, part: str) -> bool:
    """Return whether the family has such a part; imports nothing but folders."""
    return importlib.util.find_spec(_module_of(family_of(family), part)) is not None


def _module_of(family: ModelFamily, part: str) -> str:
    return f"{family.package}.{part}"


def costs_of(config: Any, *, is_on_cpu: bool = False) -> Any:
    """Return the ``Costs`` of the model of ``config``, a ``Config``, at the lengths of its samples.

    Args:
        is_on_cpu: where it is trained; what it keeps depends on that.
    """
    return load(config.family, "cost").costs(config, is_on_cpu)


def build_model(config: Any, place: Any) -> Any:
    """Return the whole model of ``config`` in one module, cut over the tensor group of ``place``."""
    parts = load(config.family, "model")
    return getattr(parts, f"{FAMILIES[config.family].prefix}Model")(parts.model_args(config), place)
