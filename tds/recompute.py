"""Recompute for layers that take or return lists and dicts: checkpoint functions know tensors and tuples alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tds.structure import Structure, flatten


def keeping_structure(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``checkpoint`` for any structure of tensors; its ``__wrapped__`` is the function itself."""

    @functools.wraps(checkpoint)
    def run(function: Callable[..., Any], *inputs: Any) -> Any:
        came = flatten(inputs[0]) if len(inputs) == 1 and type(inputs[0]) in (list, dict) else None
        returned: list[Structure] = []

        def on_tensors(*tensors: Any) -> Any:
            output = function(*tensors) if came is None else function(came[1].rebuild(tensors))
            if type(output) not in (list, dict):
                return output
            flat, structure = flatten(output)
            returned.append(structure)  # again when it is recomputed, which is the same one
            return flat

        result = checkpoint(on_tensors, *(inputs if came is None else came[0]))
        if not returned:
            return result
        return returned[0].rebuild(result if isinstance(result, tuple) else (result,))

    return run
