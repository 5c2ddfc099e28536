"""``--compile`` on the device: layers by torch.compile give what they give without."""

from __future__ import annotations

import shutil

import pytest
import torch

from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.random import DropoutStreams
from tests.gpu.families import FAMILIES, built, given, gradients, loss_of
from tests.gpu.near import assert_near, name_of

pytestmark = pytest.mark.gpu


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "dtype"), [("gpt2", torch.float32), ("llama", torch.bfloat16)], ids=name_of)
def test_compiled_layers_have_the_gradients_of_layers_as_they_are(
    name: str, dtype: torch.dtype, place: torch.device, kind: str
) -> None:
    if kind == "sim":
        pytest.skip("torch's compiler knows no such device")
    if not any(map(shutil.which, ("cc", "gcc", "g++", "clang"))):
        pytest.skip("torch.compile needs a C compiler, on a GPU too; this machine has none")
    from megatron.training.compile import compile_layers

    found = []
    for is_compiled in (False, True):
        streams = DropoutStreams(11)
        model = built(FAMILIES[name], dtype, place, ParallelContext(streams=streams), hidden_dropout=0.2, num_layers=1)
        if is_compiled:
            compile_layers(model, streams, place)
        loss = loss_of(model(**given(FAMILIES[name], place)))
        loss.backward()
        found.append(({"loss": loss.detach().cpu()}, gradients(model)))
    assert_near(found[1][0], found[0][0], dtype, 0.1)
    assert_near(found[1][1], {key: value.cpu() for key, value in found[0][1].items()}, dtype)
