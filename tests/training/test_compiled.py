"""``--compile``: how many graphs there are, that they give what plain layers give, and what stops a start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from megatron.errors import ConfigError
from megatron.mpu.random import DropoutKey
from megatron.training import compile
from megatron.training.compile import check_compiler, compile_layers
from tests.helpers.recomputed import FAMILIES, RATES, bits, make

CPU = torch.device("cpu")
NO_RATES = dict.fromkeys(RATES, 0.0)
BACKEND = "aot_eager"
"""Traces and differentiates the graphs as inductor has them, and runs them as they are: only biases round otherwise."""


def compiled_bits(family: str, backend: Any = BACKEND, **changes: Any) -> tuple[list[torch.Tensor], int]:
    """Return loss and gradients, and the number of graphs."""
    torch._dynamo.reset()
    counters.clear()
    model = make(family, **changes)
    compile_layers(model, model.place.streams, CPU, backend=backend)
    return bits(model), counters["stats"]["unique_graphs"]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Return whether loss and gradients are the same to rounding, which another mask of dropout is not."""
    pairs = zip(found, wanted, strict=True)
    return all(bool((one - other).abs().max() <= 1e-6 * max(other.abs().max(), 1e-2)) for one, other in pairs)


@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
def test_all_layers_share_the_graphs_of_one_and_no_graph_draws_masks() -> None:
    """Nine layers, for a function that is compiled for the ninth time is an error here; else torch would only warn."""
    seen = []

    def watching(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(graph.code)
        return aot_eager(graph, inputs)

    changes = {"num_layers": 9, "checkpoint_activations": True}
    found, number = compiled_bits("gpt2", watching, **changes)
    assert same(found, bits(make("gpt2", **changes)))
    assert number == len(seen) == 5
    assert not any("dropout" in code.replace("dropout_p=0.0", "").replace("keyed_dropout", "") for code in seen)


@pytest.mark.slow
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
def test_a_layer_that_drops_hidden_states_alone_is_one_graph_of_every_step_and_micro_batch() -> None:
    """The second forward is another micro-batch of another step: other masks, and no graph more."""
    rates = {"attention_dropout": 0.0, "checkpoint_activations": True}
    torch._dynamo.reset()
    counters.clear()
    model, plain = make("gpt2", **rates), make("gpt2", **rates)
    compile_layers(model, model.place.streams, CPU, backend=BACKEND)
    found, wanted = bits(model), bits(plain)
    assert same(found, wanted)
    for one in (model, plain):
        one.place.streams.position = DropoutKey(7, 3)
    inputs = torch.randn(5, 2, model.sizes.hidden_size)
    later = [one.layers[0](inputs) for one in (model, plain)]
    assert same([later[0]], [later[1]]) and counters["stats"]["unique_graphs"] <= 2
    model.place.streams.position = DropoutKey(8, 3)
    assert not same([model.layers[0](inputs)], [later[1]]) and counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
@pytest.mark.parametrize(
    "changes",
    [NO_RATES, {}, {"checkpoint_activations": True, "checkpoint_in_cpu": True}, {"recompute_attention": True}],
    ids=["no dropout", "dropout", "recompute", "attention recomputed"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_of_every_family_give_what_plain_ones_give(family: str, changes: dict[str, Any]) -> None:
    few, number = compiled_bits(family, **changes)
    assert same(few, bits(make(family, **changes)))
    more = {"num_layers": 10, **({"enc_layers": 10, "dec_layers": 10} if family == "t5" else {})}
    assert compiled_bits(family, **more, **changes)[1] == number, "as many graphs for any number of layers"
    if changes == NO_RATES:
        assert number == (2 if family == "t5" else 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_of_inductor_equal_plain_layers_to_rounding(
    family: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found, _ = compiled_bits(family, "inductor")
    for one, other in zip(found, bits(make(family)), strict=True):
        assert (one - other).abs().max() <= 2e-5 * max(other.abs().max(), 1.0)


def test_a_cpu_without_a_compiler_is_told_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compile.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"--compile on a CPU needs a C\+\+ compiler, found none of g\+\+, clang\+\+"):
        check_compiler(CPU)
    monkeypatch.setenv("CXX", "mine")
    with pytest.raises(ConfigError, match="found none of mine"):
        check_compiler(CPU)
    monkeypatch.setattr(compile.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs Triton"):
        check_compiler(torch.device("cuda"))


def test_cuda_graphs_are_refused_on_a_gpu_and_do_not_matter_to_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(compile.shutil, "which", lambda name: name)
    check_compiler(torch.device("cuda"))
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        check_compiler(CPU)
        with pytest.raises(
            ConfigError, match="does not support CUDA graphs.* got TORCHINDUCTOR_CUDAGRAPHS=1. Unset it"
        ):
            check_compiler(torch.device("cuda"))


def test_a_model_without_such_layers_is_refused_and_an_empty_stage_is_not() -> None:
    from megatron.mpu.random import DropoutStreams

    head = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="got none in Linear"):
        compile_layers(head, DropoutStreams(), CPU, backend=BACKEND)
    compile_layers(head, DropoutStreams(), CPU, backend=BACKEND, has_all=False)


def test_an_error_of_the_compiler_ends_the_run() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such kernel")

    model = make("gpt2", **NO_RATES)
    torch._dynamo.reset()
    compile_layers(model, model.place.streams, CPU, backend=broken)
    with pytest.raises(Exception, match="no such kernel"):
        bits(model)


class Doubling(torch.nn.Module):
    """A layer that compiles at once: it has a feed-forward half and does not use it."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8)
def test_each_length_of_a_schedule_has_a_graph_however_many_they_are() -> None:
    """Torch stops at the ninth: an error here, else a warning behind which a layer runs as it is written."""
    torch._dynamo.reset()
    counters.clear()
    model: Any = make("gpt2", **NO_RATES)
    layer = Doubling(model.layers[0].mlp)
    compile_layers(layer, model.place.streams, CPU, backend="eager", num_lengths=10)
    for length in range(2, 12):
        layer(torch.zeros(length))
    assert counters["stats"]["unique_graphs"] == 10
