"""Names of modules that do not depend on how the model is laid out, as those of its parameters do not."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (logical name, module) for each module of this rank but the model itself.

    A model whose local names depend on its stage offers ``logical_name(local_name)``, which is asked for a name that
    ends in a dot. Several modules may have one name (T5's embeddings of both sides); where one lies within the other,
    such as a norm in a pipeline's wrapper, the inner one has it.
    """
    logical_name = getattr(model, "logical_name", None)
    local = {name: module for name, module in model.named_modules() if name}
    names = {each: each if logical_name is None else _asked(logical_name, each) for each in local}
    return [
        (name, local[each])
        for each, name in names.items()
        if name and not any(other == name and inner.startswith(f"{each}.") for inner, other in names.items())
    ]


def _asked(logical_name: Callable[[str], str], local_name: str) -> str:
    """Return the logical name, "" for what only holds modules (``tied_modules``) and has none."""
    try:
        return logical_name(f"{local_name}.").rstrip(".")
    except (ValueError, KeyError, IndexError):
        return ""
