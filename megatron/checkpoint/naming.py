"""Names of parameters that do not depend on how the model is laid out."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (logical name, parameter) for each parameter that this rank holds, a shared one once.

    A model whose local names depend on its stage offers ``logical_name(local_name) -> str``; otherwise the local
    name is the logical one. Copies of a tied weight on several stages have the same logical name.

    Raises:
        ValueError: two different parameters of this rank have one logical name.
    """
    logical_name = getattr(model, "logical_name", None)
    local_names: dict[str, str] = {}
    for local_name, parameter in model.named_parameters():
        name = logical_name(local_name) if logical_name is not None else local_name
        if name in local_names:
            raise ValueError(
                f"a logical name must belong to one parameter, {name} is given to {local_names[name]} and {local_name}"
            )
        local_names[name] = local_name
        yield name, parameter
