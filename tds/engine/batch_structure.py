"""The structure ``((inputs...), labels)`` of a micro-batch, and the errors for other structures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

BATCH_STRUCTURE = (
    "((inputs...), labels): what the first layer takes, and what the loss function takes beside the output"
)
_MOST_SHOWN = 6
_DEEPEST = 6
_LABELS = ("labels", "label", "targets", "target", "y")


def describe_structure(value: Any, depth: int = 0) -> str:
    """Return the structure of ``value`` as text, such as "(tensor [4, 128], {'mask': tensor [4]})"."""
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)}"
    if isinstance(value, (Mapping, tuple, list)) and depth == _DEEPEST:
        return "..."
    if isinstance(value, Mapping):
        items = list(value.items())
        parts = [f"{key!r}: {describe_structure(element, depth + 1)}" for key, element in items[:_MOST_SHOWN]]
        return "{" + ", ".join([*parts, *_rest(len(items))]) + "}"
    if isinstance(value, (tuple, list)):
        parts = [*(describe_structure(element, depth + 1) for element in value[:_MOST_SHOWN]), *_rest(len(value))]
        if isinstance(value, list):
            return f"[{', '.join(parts)}]"
        return f"({', '.join(parts)}{',' if len(value) == 1 else ''})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__module__.partition('.')[0]} array {list(value.shape)}"
    return "None" if value is None else type(value).__name__


def no_pair(batch: Any, origin: str) -> TypeError:
    """Return the error for a micro-batch from ``origin`` that is not (inputs, labels)."""
    return TypeError(
        f"a micro-batch must be {BATCH_STRUCTURE}, got {describe_structure(batch)} from {origin}. {_advice(batch)}"
    )


def refuse_input(value: Any, path: str, inputs: Any) -> TypeError:
    """Return the error for an element of the first layer's inputs that is not a tensor.

    Args:
        path: the position of ``value`` in the inputs, such as "inputs[1]".
        inputs: all inputs of the first layer.
    """
    hint = "Leave it out"
    if hasattr(value, "__array__") or isinstance(value, (int, float)):
        hint = "Make a tensor of it (torch.as_tensor), or leave it to torch's default collate function"
    elif isinstance(value, (str, bytes)):
        hint = "Leave it out, or make numbers of the text first"
    return TypeError(
        "the first stage's inputs must be tensors, or tuples, lists or dicts of them, got "
        f"{type(value).__name__} at {path} of the inputs {describe_structure(inputs)}. {hint}"
    )


def _rest(number: int) -> list[str]:
    return [f"{number - _MOST_SHOWN} more"] if number > _MOST_SHOWN else []


def _advice(batch: Any) -> str:
    if batch is None:
        return "Return the pair from the batch function (one without a return gives None), or let the loader give it"
    if isinstance(batch, torch.Tensor):
        return "Give (it, labels); where there are no labels, or they travel with the inputs, give (it, None)"
    if isinstance(batch, Mapping):
        return _advice_on_names([key for key in batch if isinstance(key, str)])
    if isinstance(batch, (tuple, list)):
        return _advice_on_parts(tuple(batch))
    return "Give tensors: a pair from the loader's collate_fn, or from a batch function (engine.set_batch_fn)"


def _advice_on_names(names: list[str]) -> str:
    labels = next((name for name in _LABELS if name in names), names[-1] if len(names) > 1 else "labels")
    inputs = "".join(f'batch["{name}"], ' for name in names if name != labels)[:-1] or 'batch["inputs"],'
    inputs = inputs if inputs.count(",") == 1 else inputs.rstrip(",")
    return (
        "Say which is which: from collate_fn, or by "
        f'engine.set_batch_fn(lambda batch: (({inputs}), batch["{labels}"])) where a rank without data gets none'
    )


def _advice_on_parts(parts: tuple[Any, ...]) -> str:
    if not parts:
        return "It is empty; let the loader give (inputs, labels)"
    if len(parts) == 1:
        inner = parts[0]
        if isinstance(inner, (tuple, list)) and len(inner) == 2:
            return f"It is nested one level too deep: give {describe_structure(inner)}"
        corrected = f"({describe_structure(inner)}, labels)"
        return f"The labels are missing: give {corrected}; where there are none, None in their place"
    nested = parts[:-1], parts[-1]
    shown = describe_structure(nested)
    return f"Put what the first layer takes into a tuple of its own: {shown}, if the last are the labels"
