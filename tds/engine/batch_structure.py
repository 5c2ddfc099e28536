"""The structure ``((inputs...), labels)`` of a micro-batch, and the errors for other structures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

BATCH_STRUCTURE = "((inputs...), labels): the inputs of the first layer, and the labels of the loss function"
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
    hint = "Remove it"
    if hasattr(value, "__array__") or isinstance(value, (int, float)):
        hint = "Convert it to a tensor (torch.as_tensor), or use torch's default collate function"
    elif isinstance(value, (str, bytes)):
        hint = "Remove it, or convert the text to numbers first"
    return TypeError(
        "the first stage's inputs must be tensors, or tuples, lists or dicts of them, got "
        f"{type(value).__name__} at {path} of the inputs {describe_structure(inputs)}. {hint}"
    )


def _rest(number: int) -> list[str]:
    return [f"{number - _MOST_SHOWN} more"] if number > _MOST_SHOWN else []


def _advice(batch: Any) -> str:
    if batch is None:
        return (
            "Return the pair from the batch function (without a return statement it returns None), or from the loader"
        )
    if isinstance(batch, torch.Tensor):
        return "Return (tensor, labels), or (tensor, None) if there are no labels or the inputs contain them"
    if isinstance(batch, Mapping):
        return _advice_on_names([key for key in batch if isinstance(key, str)])
    if isinstance(batch, (tuple, list)):
        return _advice_on_parts(tuple(batch))
    return "Return a pair of tensors from the loader's collate_fn, or from a batch function (engine.set_batch_fn)"


def _advice_on_names(names: list[str]) -> str:
    labels = next((name for name in _LABELS if name in names), names[-1] if len(names) > 1 else "labels")
    inputs = "".join(f'batch["{name}"], ' for name in names if name != labels)[:-1] or 'batch["inputs"],'
    inputs = inputs if inputs.count(",") == 1 else inputs.rstrip(",")
    return (
        "Return the pair from collate_fn, or call "
        f'engine.set_batch_fn(lambda batch: (({inputs}), batch["{labels}"])). A rank without data calls it with None'
    )


def _advice_on_parts(parts: tuple[Any, ...]) -> str:
    if not parts:
        return "The batch is empty. The loader must return (inputs, labels)"
    if len(parts) == 1:
        inner = parts[0]
        if isinstance(inner, (tuple, list)) and len(inner) == 2:
            return f"It is nested one level too deep. Return {describe_structure(inner)}"
        corrected = f"({describe_structure(inner)}, labels)"
        return f"The labels are missing. Return {corrected}, with None in place of the labels if there are none"
    nested = parts[:-1], parts[-1]
    shown = describe_structure(nested)
    return f"Put the inputs of the first layer into one tuple: {shown}, if the last element is the labels"
