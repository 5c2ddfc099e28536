"""Gated DeltaNet and Kimi Delta Attention against the classes of transformers with the same weights.

The tests compare the output and the gradients of the input and of every weight, in fp64. The classes compute norms,
decays and states in fp32, unless ``fp64_instead_of_fp32`` replaces their casts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from megatron.models.common.delta_mixer import DeltaMixer
from tests.helpers.delta_samples import make_mixer
from tests.helpers.upcasts import fp64_instead_of_fp32
from tests.helpers.whole import random_tensor

HIDDEN, LENGTH, BATCH = 16, 70, 2
"""More than a chunk of 64 tokens."""
KEY_HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE = 4, 8, 6, 5
COMMON = {
    "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-3,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
GDN_SETTINGS = {
    "linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": VALUE_HEADS, "linear_key_head_dim": KEY_SIZE,
    "linear_value_head_dim": VALUE_SIZE,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def grouped_rows(weight: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Split rows that are ordered by key head, with ``sizes`` rows of each part per key head."""
    return [part.flatten(0, 1) for part in weight.unflatten(0, (KEY_HEADS, -1)).split(sizes, dim=1)]


def convolution_weights(theirs: Tensors, widths: list[int]) -> Tensors:
    parts = theirs["conv1d.weight"].squeeze(1).split(widths)
    return {f"convolution.{name}": part for name, part in zip(("query", "key", "value"), parts, strict=True)}


GDN_WIDTHS = [KEY_HEADS * KEY_SIZE, KEY_HEADS * KEY_SIZE, VALUE_HEADS * VALUE_SIZE]


def from_qwen3_next(theirs: Tensors) -> Tensors:
    num_values = VALUE_HEADS // KEY_HEADS
    sizes = [KEY_SIZE, KEY_SIZE, num_values * VALUE_SIZE, num_values * VALUE_SIZE]
    query, key, value, gate = grouped_rows(theirs["in_proj_qkvz.weight"], sizes)
    beta, decay = grouped_rows(theirs["in_proj_ba.weight"], [num_values, num_values])
    parts = {"query": query, "key": key, "value": value, "gate": gate, "beta": beta, "decay": decay}
    return {
        **{f"projections.{name}": part for name, part in parts.items()}, **convolution_weights(theirs, GDN_WIDTHS),
        "A_log": theirs["A_log"], "dt_bias": theirs["dt_bias"], "output_norm.weight": theirs["norm.weight"],
        "dense.weight": theirs["out_proj.weight"],
    }  # fmt: skip


def from_qwen3_5(theirs: Tensors) -> Tensors:
    query, key, value = theirs["in_proj_qkv.weight"].split(GDN_WIDTHS)
    return {
        "projections.query": query, "projections.key": key, "projections.value": value,
        "projections.gate": theirs["in_proj_z.weight"], "projections.beta": theirs["in_proj_b.weight"],
        "projections.decay": theirs["in_proj_a.weight"], **convolution_weights(theirs, GDN_WIDTHS),
        "A_log": theirs["A_log"], "dt_bias": theirs["dt_bias"], "output_norm.weight": theirs["norm.weight"],
        "dense.weight": theirs["out_proj.weight"],
    }  # fmt: skip


def from_olmo_hybrid(theirs: Tensors) -> Tensors:
    parts = {"query": "q", "key": "k", "value": "v", "gate": "g", "beta": "b", "decay": "a"}
    return {
        **{f"projections.{name}": theirs[f"{letter}_proj.weight"] for name, letter in parts.items()},
        **convolution_weights(theirs, GDN_WIDTHS), "A_log": theirs["A_log"], "dt_bias": theirs["dt_bias"],
        "output_norm.weight": theirs["o_norm.weight"], "dense.weight": theirs["o_proj.weight"],
    }  # fmt: skip


def from_kimi(theirs: Tensors) -> Tensors:
    parts = {"query": "q", "key": "k", "value": "v", "beta": "b"}
    gates = {
        "gates_down.weight": torch.cat((theirs["forget_gate.f_a_proj.weight"], theirs["g_a_proj.weight"])),
        "decay_up.weight": theirs["forget_gate.f_b_proj.weight"], "gate_up.weight": theirs["g_b_proj.weight"],
    } if "g_a_proj.weight" in theirs else {
        "projections.decay": theirs["forget_gate.f_proj.weight"], "projections.gate": theirs["g_proj.weight"],
    }  # fmt: skip
    return {
        **{f"projections.{name}": theirs[f"{letter}_proj.weight"] for name, letter in parts.items()}, **gates,
        **convolution_weights(theirs, [KEY_HEADS * KEY_SIZE] * 3), "A_log": theirs["forget_gate.A_log"].flatten(),
        "dt_bias": theirs["forget_gate.dt_bias"], "output_norm.weight": theirs["o_norm.weight"],
        "dense.weight": theirs["o_proj.weight"],
    }  # fmt: skip


class Case(NamedTuple):
    """A class of transformers.

    Args:
        module: folder of the class.
        names: names of the mixer's class and of its configuration's class.
        settings: settings of the configuration.
        variant: name in ``delta_samples.VARIANTS``.
        to_ours: converts the weights of the class, or their gradients, to our names and shapes.
        overrides: further ``ModelArgs``.
    """

    module: str
    names: tuple[str, str]
    settings: dict[str, Any]
    variant: str
    to_ours: Callable[[Tensors], Tensors]
    overrides: dict[str, Any] = {}


KDA_SETTINGS = {"linear_head_dim": KEY_SIZE, "linear_num_heads": KEY_HEADS}
CASES = {
    "Qwen3-Next": Case(
        "qwen3_next", ("Qwen3NextGatedDeltaNet", "Qwen3NextConfig"), GDN_SETTINGS, "gdn", from_qwen3_next
    ),
    "Qwen3.5": Case("qwen3_5", ("Qwen3_5GatedDeltaNet", "Qwen3_5TextConfig"), GDN_SETTINGS, "gdn", from_qwen3_5),
    "OLMo Hybrid": Case(
        "olmo_hybrid", ("OlmoHybridGatedDeltaNet", "OlmoHybridConfig"), GDN_SETTINGS, "gdn, negative eigenvalues",
        from_olmo_hybrid, {"linear_norm_epsilon": 1e-5},
    ),
    "Kimi Linear": Case(
        "kimi_linear", ("KimiLinearDeltaAttention", "KimiLinearConfig"), KDA_SETTINGS, "kda", from_kimi
    ),
    "bailing_hybrid": Case(
        "bailing_hybrid", ("BailingHybridDeltaAttention", "BailingHybridConfig"), {"head_dim": KEY_SIZE},
        "kda, full gates", from_kimi,
    ),
}  # fmt: skip


def make_theirs(case: Case) -> Any:
    """Return the mixer of transformers with random weights, including those that are initialised to constants."""
    modeling = importlib.import_module(f"transformers.models.{case.module}.modeling_{case.module}")
    configuration = importlib.import_module(f"transformers.models.{case.module}.configuration_{case.module}")
    class_name, config_name = case.names
    config = getattr(configuration, config_name)(**COMMON, **case.settings)
    mixer = getattr(modeling, class_name)(config, 0).double()
    with torch.no_grad():
        for idx, (name, parameter) in enumerate(mixer.named_parameters()):
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(mean + 0.5 * random_tensor(idx, *parameter.shape))
    return mixer


def run(
    mixer: torch.nn.Module, x: torch.Tensor, output_grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """Return output, gradient of the input, and gradients of the weights."""
    x = x.clone().requires_grad_()
    output = mixer(x)
    output.backward(output_grad)
    assert x.grad is not None
    return output.detach(), x.grad, {name: p.grad for name, p in mixer.named_parameters() if p.grad is not None}


def worst_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("is_patched", [True, False])
def test_output_and_gradients_match_transformers(case: Case, is_patched: bool) -> None:
    x, output_grad = random_tensor(100, BATCH, LENGTH, HIDDEN), random_tensor(101, BATCH, LENGTH, HIDDEN)
    with fp64_instead_of_fp32() if is_patched else nullcontext():
        theirs = make_theirs(case)
        weights = case.to_ours(theirs.state_dict())
        expected, expected_grad, expected_grads = run(theirs, x, output_grad)
    ours: DeltaMixer = make_mixer(case.variant, **case.overrides)
    ours.load_state_dict(weights)
    output, grad, grads = run(ours, x.transpose(0, 1), output_grad.transpose(0, 1))
    tolerance = 1e-12 if is_patched else 1e-5
    assert worst_error(output.transpose(0, 1), expected) <= tolerance
    assert worst_error(grad.transpose(0, 1), expected_grad) <= tolerance
    expected_grads = case.to_ours(expected_grads)
    assert grads.keys() == expected_grads.keys()
    for name, expected_grad in expected_grads.items():
        assert worst_error(grads[name], expected_grad) <= tolerance, name
