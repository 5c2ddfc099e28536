"""Every family, forward and backward on the device, against the CPU in fp64: logits, loss, every gradient by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.gpu.families import FAMILIES, built, given, gradients, loss_of, reference_of
from tests.gpu.near import DTYPES, assert_near, name_of

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {},
    "recomputed": {"checkpoint_activations": True},
    "attention recomputed": {"recompute_attention": True},
    "kept on the host": {"checkpoint_activations": True, "checkpoint_in_cpu": True, "contiguous_checkpointing": True},
    "chunked loss": {"loss_chunk_tokens": 50},
}
"""Of sizes; 50 divides no number of tokens here."""


def passed(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a batch and all gradients of it."""
    loss = loss_of(model(**batch))
    loss.backward()
    return loss.detach(), gradients(model)


@functools.cache
def wanted(name: str, dtype: torch.dtype, has_documents: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return what ``passed`` gives on the CPU in fp64, in the plain way whatever the device does."""
    return passed(reference_of(FAMILIES[name], dtype), given(FAMILIES[name], CPU, has_documents))


def logits_of(model: torch.nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what a model gives without labels, in evaluation."""
    left_out = ("labels", "loss_mask", "is_random")
    with torch.no_grad():
        found = model.eval()(**{name: value for name, value in batch.items() if name not in left_out})
    if "dec_segments" in batch:  # what padding says is noise: it may look nowhere
        found = found * (batch["dec_segments"] >= 0).t().unsqueeze(-1)
    return {"logits": found} if isinstance(found, torch.Tensor) else dict(zip(("logits", "scores"), found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_every_gradient_are_those_of_the_cpu(
    name: str, way: str, dtype: torch.dtype, place: torch.device
) -> None:
    family, has_documents = FAMILIES[name], way != "plain"
    model = built(family, dtype, place, **WAYS[way])
    loss, found = passed(model, given(family, place, has_documents))
    right, others = wanted(name, dtype, has_documents)
    assert loss.device.type == place.type and loss.dtype == torch.promote_types(dtype, torch.float32)
    assert_near({"loss": loss}, {"loss": right}, dtype, 0.1)
    assert_near(found, others, dtype, family.rough.get(dtype, 1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_cpu(name: str, dtype: torch.dtype, place: torch.device) -> None:
    family = FAMILIES[name]
    for has_documents in (False, True):
        found = logits_of(built(family, dtype, place), given(family, place, has_documents))
        others = logits_of(reference_of(family, dtype), given(family, CPU, has_documents))
        assert_near(found, others, dtype, family.rough.get(dtype, 1.0))


def test_a_batch_on_the_host_is_refused_where_the_device_is_another(place: torch.device, kind: str) -> None:
    """That the tests of this folder see a mix of devices at all."""
    if kind == "cpu":
        pytest.skip("the device and the host are one")
    family = FAMILIES["gpt2"]
    with pytest.raises(RuntimeError):
        built(family, torch.float32, place)(**given(family, CPU))
