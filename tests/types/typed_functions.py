"""Type checks of each call of the functions in ``signatures``, including the bodies of their forward and backward.

``spmd_types`` trusts the declared types of an autograd function and does not look at its backward. Here each call also
runs the bodies of forward and backward on copies of its arguments, with type checks of their operations and
collectives, and compares the results with the signature. A backward without its all-reduce, for example, returns a P
where the signature requires an I.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import spmd_types as spmd
import torch

from megatron.mpu import mappings
from tests.mutants.mutant import replace_references
from tests.types.local_types import Types, compare, gradient_types, set_types
from tests.types.signatures import AUTOGRAD_FUNCTIONS, LOCAL_FUNCTIONS, PLAIN_FUNCTIONS, Signature

is_active = False
"""Whether calls are checked: in the forward of a model, but not when backward runs parts of it again."""


class _Context:
    """The ``ctx`` of an autograd function whose bodies are called directly, so that saved tensors keep their types."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        self.saved_tensors: tuple[Any, ...] = ()
        self.non_differentiable: tuple[torch.Tensor, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        self.non_differentiable = tensors

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        """Accept tensors that forward overwrites: they are copies."""

    def set_materialize_grads(self, value: bool) -> None:
        """Accept any value: all gradients are tensors here."""


def install() -> None:
    """Check all calls of the declared functions in this process from now on, while ``is_active``."""
    if hasattr(mappings._Copy.apply, "func"):  # installed before
        return
    for function in LOCAL_FUNCTIONS:
        spmd.register_local_autograd_function(function)
    for function, signature in AUTOGRAD_FUNCTIONS.items():
        plain_apply = function.apply
        function.apply = staticmethod(partial(_apply, function, signature, plain_apply))  # type: ignore[method-assign]
    for (module, name), signature in PLAIN_FUNCTIONS.items():
        original = getattr(module, name)
        replacement = _checked(original, signature, name)
        setattr(module, name, replacement)
        replace_references(name, original, replacement)


def _apply(function: Any, signature: Callable[..., Signature], plain_apply: Callable[..., Any], *args: Any) -> Any:
    """Check a call of the autograd function, call it and set the types of its outputs."""
    if not is_active or not spmd.is_type_checking():
        return plain_apply(*args)
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
    try:
        declared = signature(*args)
        has_backward = torch.is_grad_enabled()
        with torch.no_grad():
            _check_bodies(function, args, declared, has_backward)
    except spmd.SpmdTypeError as error:
        raise spmd.SpmdTypeError(f"{name}: {error}") from error
    with spmd.no_typecheck():
        results = plain_apply(*args)
    for result, types in zip(_as_tuple(results), declared.outputs, strict=True):
        set_types(result, types)
    return results


def _check_bodies(function: Any, args: tuple[Any, ...], declared: Signature, has_backward: bool) -> None:
    """Run the bodies of forward and backward on copies of ``args``, and compare their results with ``declared``."""
    ctx = _Context(args)
    inputs = [*declared.inputs, *(None for _ in args[len(declared.inputs) :])]
    copies = [_typed_copy(arg, types) if types is not None else arg for arg, types in zip(args, inputs, strict=True)]
    outputs = _as_tuple(function.forward(ctx, *copies))
    for output, types in zip(outputs, declared.outputs, strict=True):
        compare(output, types, "the result of forward")
    if not has_backward or not any(ctx.needs_input_grad):
        return
    grad_types = declared.grads or [gradient_types(types) for types in declared.outputs]
    grads = [_typed_copy(output, types) for output, types in zip(outputs, grad_types, strict=True)]
    input_grads = _as_tuple(function.backward(ctx, *grads))
    for idx, (grad, types, is_needed) in enumerate(zip(input_grads, inputs, ctx.needs_input_grad, strict=False)):
        if is_needed:
            assert grad is not None and types is not None, f"argument {idx} gets no gradient"
            compare(grad, gradient_types(types), f"the gradient of argument {idx}")


def _typed_copy(x: torch.Tensor, types: Types) -> torch.Tensor:
    with spmd.no_typecheck():
        copy = x.detach().clone()
    return spmd.assert_type(copy, types)


def _checked(function: Callable[..., Any], signature: Callable[..., Signature], name: str) -> Callable[..., Any]:
    """Return ``function`` with a check of its input and output."""

    @wraps(function)
    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_active or not spmd.is_type_checking() or args[0].size == 1:
            return function(x, *args, **kwargs)
        try:
            declared = signature(x, *args, **kwargs)
            if declared.inputs[0] is not None:
                set_types(x, declared.inputs[0])
            result = function(x, *args, **kwargs)
            output = result if isinstance(result, torch.Tensor) else result.tensor
            compare(output, declared.outputs[0], "the result")
        except spmd.SpmdTypeError as error:
            raise spmd.SpmdTypeError(f"{name}: {error}") from error
        set_types(output, declared.outputs[0])
        return result

    return call


def _as_tuple(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)
