"""The micro-batch structure ``((inputs...), labels)``, and errors for other structures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

BATCH_STRUCTURE = "((inputs...), labels): the inputs of the first layer, and the labels of the loss function"
_MAX_SHOWN = 6
_MAX_DEPTH = 6
_LABELS = ("labels", "label", "targets", "target", "y")


def describe_structure(value: Any, depth: int = 0) -> str:
    """Describe the structure of ``value``, such as "(tensor [4, 128], {'mask': tensor [4]})"."""
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)}"
    if isinstance(value, (Mapping, tuple, list)) and depth == _MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        items = list(value.items())
        elements = [f"{key!r}: {describe_structure(element, depth + 1)}" for key, element in items[:_MAX_SHOWN]]
        return "{" + ", ".join([*elements, *_format_omitted(len(items))]) + "}"
    if isinstance(value, (tuple, list)):
        elements = [
            *(describe_structure(element, depth + 1) for element in value[:_MAX_SHOWN]),
            *_format_omitted(len(value)),
        ]
        if isinstance(value, list):
            return f"[{', '.join(elements)}]"
        return f"({', '.join(elements)}{',' if len(value) == 1 else ''})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__module__.partition('.')[0]} array {list(value.shape)}"
    return "None" if value is None else type(value).__name__


def structure_error(batch: Any, origin: str) -> TypeError:
    """Create the error for a micro-batch from ``origin`` that is not (inputs, labels)."""
    return TypeError(
        f"a micro-batch must be {BATCH_STRUCTURE}, got {describe_structure(batch)} from {origin}. {_hint(batch)}"
    )


def input_error(value: Any, path: str, inputs: Any) -> TypeError:
    """Create the error for an element of the first layer's inputs that is not a tensor.

    Args:
        path: position in the inputs, such as "inputs[1]".
        inputs: all first-layer inputs.
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


def _format_omitted(num_items: int) -> list[str]:
    return [f"{num_items - _MAX_SHOWN} more"] if num_items > _MAX_SHOWN else []


def _hint(batch: Any) -> str:
    if batch is None:
        return (
            "Return the pair from the batch function (without a return statement it returns None), or from the loader"
        )
    if isinstance(batch, torch.Tensor):
        return "Return (tensor, labels), or (tensor, None) if there are no labels or the inputs contain them"
    if isinstance(batch, Mapping):
        return _hint_for_names([key for key in batch if isinstance(key, str)])
    if isinstance(batch, (tuple, list)):
        return _hint_for_sequence(tuple(batch))
    return "Return a pair of tensors from the loader's collate_fn, or from a batch function (engine.set_batch_fn)"


def _hint_for_names(names: list[str]) -> str:
    labels = next((name for name in _LABELS if name in names), names[-1] if len(names) > 1 else "labels")
    inputs = "".join(f'batch["{name}"], ' for name in names if name != labels)[:-1] or 'batch["inputs"],'
    inputs = inputs if inputs.count(",") == 1 else inputs.rstrip(",")
    return (
        "Return the pair from collate_fn, or call "
        f'engine.set_batch_fn(lambda batch: (({inputs}), batch["{labels}"])). A rank without data calls it with None'
    )


def _hint_for_sequence(elements: tuple[Any, ...]) -> str:
    if not elements:
        return "The batch is empty. The loader must return (inputs, labels)"
    if len(elements) == 1:
        inner = elements[0]
        if isinstance(inner, (tuple, list)) and len(inner) == 2:
            return f"It is nested one level too deep. Return {describe_structure(inner)}"
        corrected = f"({describe_structure(inner)}, labels)"
        return f"The labels are missing. Return {corrected}, with None in place of the labels if there are none"
    nested = elements[:-1], elements[-1]
    shown = describe_structure(nested)
    return f"Put the inputs of the first layer into one tuple: {shown}, if the last element is the labels"
