"""Every family, forward and backward on the device, against the CPU in fp64: logits, loss, every gradient by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.gpu.families import FAMILIES, build_model, build_reference, loss_of, make_inputs, named_gradients
from tests.gpu.near import DTYPES, assert_near, name_of

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {},
    "recomputed": {"checkpoint_activations": True},
    "attention recomputed": {"recompute_attention": True},
    "kept on the host": {"checkpoint_activations": True, "checkpoint_in_cpu": True, "contiguous_checkpointing": True},
    "chunked loss": {"loss_chunk_tokens": 50},
}
"""Of sizes; 50 divides no number of tokens here."""


def loss_and_gradients(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a batch and all gradients of it."""
    loss = loss_of(model(**batch))
    loss.backward()
    return loss.detach(), named_gradients(model)


@functools.cache
def reference_loss_and_gradients(
    name: str, dtype: torch.dtype, has_documents: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return what ``loss_and_gradients`` gives on the CPU in fp64, in the plain way whatever the device does."""
    return loss_and_gradients(build_reference(FAMILIES[name], dtype), make_inputs(FAMILIES[name], CPU, has_documents))


def logits_of(model: torch.nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what a model gives without labels, in evaluation."""
    loss_inputs = ("labels", "loss_mask", "is_random")
    with torch.no_grad():
        outputs = model.eval()(**{name: value for name, value in batch.items() if name not in loss_inputs})
    if "dec_segments" in batch:  # what padding says is noise: it may look nowhere
        outputs = outputs * (batch["dec_segments"] >= 0).t().unsqueeze(-1)
    return (
        {"logits": outputs}
        if isinstance(outputs, torch.Tensor)
        else dict(zip(("logits", "scores"), outputs, strict=True))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_match_cpu(name: str, variant: str, dtype: torch.dtype, torch_device: torch.device) -> None:
    family, has_documents = FAMILIES[name], variant != "plain"
    model = build_model(family, dtype, torch_device, **VARIANTS[variant])
    loss, grads = loss_and_gradients(model, make_inputs(family, torch_device, has_documents))
    expected_loss, expected_grads = reference_loss_and_gradients(name, dtype, has_documents)
    assert loss.device.type == torch_device.type and loss.dtype == torch.promote_types(dtype, torch.float32)
    assert_near({"loss": loss}, {"loss": expected_loss}, dtype, 0.1)
    assert_near(grads, expected_grads, dtype, family.tolerance_factors.get(dtype, 1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_match_cpu(name: str, dtype: torch.dtype, torch_device: torch.device) -> None:
    family = FAMILIES[name]
    for has_documents in (False, True):
        actual = logits_of(build_model(family, dtype, torch_device), make_inputs(family, torch_device, has_documents))
        expected = logits_of(build_reference(family, dtype), make_inputs(family, CPU, has_documents))
        assert_near(actual, expected, dtype, family.tolerance_factors.get(dtype, 1.0))


def test_host_batch_is_rejected_on_other_device(torch_device: torch.device, device_type: str) -> None:
    """That the tests of this folder see a mix of devices at all."""
    if device_type == "cpu":
        pytest.skip("the device and the host are one")
    family = FAMILIES["gpt2"]
    with pytest.raises(RuntimeError):
        build_model(family, torch.float32, torch_device)(**make_inputs(family, CPU))
