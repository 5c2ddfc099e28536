"""``--compile`` on the device: layers by torch.compile give what they give without."""

from __future__ import annotations

import shutil

import pytest
import torch

from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.random import DropoutStreams
from tests.gpu.families import FAMILIES, build_model, loss_of, make_inputs, named_gradients
from tests.gpu.near import assert_near, name_of

pytestmark = pytest.mark.gpu


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "dtype"), [("gpt2", torch.float32), ("llama", torch.bfloat16)], ids=name_of)
def test_compiled_layers_match_eager_gradients(
    name: str, dtype: torch.dtype, torch_device: torch.device, device_type: str
) -> None:
    if device_type == "sim":
        pytest.skip("torch's compiler knows no such device")
    if not any(map(shutil.which, ("cc", "gcc", "g++", "clang"))):
        pytest.skip("torch.compile needs a C compiler, on a GPU too; this machine has none")
    from megatron.training.compile import compile_layers

    results = []
    for is_compiled in (False, True):
        streams = DropoutStreams(11)
        model = build_model(
            FAMILIES[name], dtype, torch_device, ParallelContext(streams=streams), hidden_dropout=0.2, num_layers=1
        )
        if is_compiled:
            compile_layers(model, streams, torch_device)
        loss = loss_of(model(**make_inputs(FAMILIES[name], torch_device)))
        loss.backward()
        results.append(({"loss": loss.detach().cpu()}, named_gradients(model)))
    assert_near(results[1][0], results[0][0], dtype, 0.1)
    assert_near(results[1][1], {key: value.cpu() for key, value in results[0][1].items()}, dtype)
