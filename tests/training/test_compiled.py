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
from tests.helpers.recomputed import DROPOUT_RATES, FAMILIES, loss_and_grads, make_model

CPU = torch.device("cpu")
NO_DROPOUT = dict.fromkeys(DROPOUT_RATES, 0.0)
BACKEND = "aot_eager"
"""Traces and differentiates the graphs as inductor has them, and runs them as they are: only biases round otherwise."""


def compiled_loss_and_grads(family: str, backend: Any = BACKEND, **changes: Any) -> tuple[list[torch.Tensor], int]:
    """Return loss and gradients, and the number of graphs."""
    torch._dynamo.reset()
    counters.clear()
    model = make_model(family, **changes)
    compile_layers(model, model.parallel.streams, CPU, backend=backend)
    return loss_and_grads(model), counters["stats"]["unique_graphs"]


def are_close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Return whether loss and gradients are the same to rounding, which another mask of dropout is not."""
    pairs = zip(actual, expected, strict=True)
    return all(
        bool((actual_tensor - expected_tensor).abs().max() <= 1e-6 * max(expected_tensor.abs().max(), 1e-2))
        for actual_tensor, expected_tensor in pairs
    )


@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
def test_all_layers_share_graphs_and_no_graph_draws_masks() -> None:
    """Nine layers, for a function that is compiled for the ninth time is an error here; else torch would only warn."""
    graph_codes = []

    def recording_backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graph_codes.append(graph.code)
        return aot_eager(graph, inputs)

    changes = {"num_layers": 9, "checkpoint_activations": True}
    actual, num_graphs = compiled_loss_and_grads("gpt2", recording_backend, **changes)
    assert are_close(actual, loss_and_grads(make_model("gpt2", **changes)))
    assert num_graphs == len(graph_codes) == 5
    assert not any("dropout" in code.replace("dropout_p=0.0", "").replace("keyed_dropout", "") for code in graph_codes)


@pytest.mark.slow
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
def test_hidden_dropout_reuses_graphs_across_steps_and_micro_batches() -> None:
    """The second forward is another micro-batch of another step: other masks, and no graph more."""
    rates = {"attention_dropout": 0.0, "checkpoint_activations": True}
    torch._dynamo.reset()
    counters.clear()
    model, eager_model = make_model("gpt2", **rates), make_model("gpt2", **rates)
    compile_layers(model, model.parallel.streams, CPU, backend=BACKEND)
    actual, expected = loss_and_grads(model), loss_and_grads(eager_model)
    assert are_close(actual, expected)
    for m in (model, eager_model):
        m.parallel.streams.position = DropoutKey(7, 3)
    inputs = torch.randn(5, 2, model.model_args.hidden_size)
    later_outputs = [m.layers[0](inputs) for m in (model, eager_model)]
    assert are_close([later_outputs[0]], [later_outputs[1]]) and counters["stats"]["unique_graphs"] <= 2
    model.parallel.streams.position = DropoutKey(8, 3)
    assert not are_close([model.layers[0](inputs)], [later_outputs[1]]) and counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
@pytest.mark.parametrize(
    "changes",
    [NO_DROPOUT, {}, {"checkpoint_activations": True, "checkpoint_in_cpu": True}, {"recompute_attention": True}],
    ids=["no dropout", "dropout", "recompute", "attention recomputed"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_equal_eager_layers_for_all_families(family: str, changes: dict[str, Any]) -> None:
    actual, num_graphs = compiled_loss_and_grads(family, **changes)
    assert are_close(actual, loss_and_grads(make_model(family, **changes)))
    more_layers = {"num_layers": 10, **({"enc_layers": 10, "dec_layers": 10} if family == "t5" else {})}
    assert compiled_loss_and_grads(family, **more_layers, **changes)[1] == num_graphs, (
        "as many graphs for any number of layers"
    )
    if changes == NO_DROPOUT:
        assert num_graphs == (2 if family == "t5" else 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_inductor_kernels_equal_eager_layers(family: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    actual, _ = compiled_loss_and_grads(family, "inductor")
    for actual_tensor, expected_tensor in zip(actual, loss_and_grads(make_model(family)), strict=True):
        assert (actual_tensor - expected_tensor).abs().max() <= 2e-5 * max(expected_tensor.abs().max(), 1.0)


def test_kernels_are_compiled_without_slp_vectorizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cpp_builder import CppBuilder, CppOptions

    def compiler_flags() -> list[str]:
        return CppBuilder(name="kernel", sources="kernel.cpp", BuildOption=CppOptions()).get_command_line().split()

    monkeypatch.setattr(compile, "check_compiler", lambda device: None)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *args, **kwargs: None)  # imports of inductor take seconds
    model = make_model("gpt2", **NO_DROPOUT)
    with torch._inductor.config.patch({"cpp.enable_floating_point_contract_flag": "off"}):
        compile_layers(model, model.parallel.streams, torch.device("cuda"))
        assert compile.NO_SLP not in compiler_flags()
        for _ in range(2):
            compile_layers(model, model.parallel.streams, CPU)
            assert compiler_flags().count(compile.NO_SLP) == 1
        assert "-ffp-contract=off" in compiler_flags()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernel_of_two_transposes_equals_eager(
    dtype: torch.dtype, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """g++ 12.2 with AVX-512 miscompiles this kernel with torch's own flags."""

    def transpose_both(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
        return torch.stack((even.t(), odd.t()), 1)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    even, odd = torch.arange(2 * 64 * 96).remainder(251).to(dtype).view(2, 64, 96)
    with torch._inductor.config.patch({"cpp.enable_floating_point_contract_flag": "off"}):
        compile.avoid_miscompiled_transposes()
        assert torch.equal(torch.compile(transpose_both)(even, odd), transpose_both(even, odd))


def test_missing_compiler_raises(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_cuda_graphs_are_rejected_on_gpu_and_ignored_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(compile.shutil, "which", lambda name: name)
    check_compiler(torch.device("cuda"))
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        check_compiler(CPU)
        with pytest.raises(
            ConfigError, match="does not support CUDA graphs.* got TORCHINDUCTOR_CUDAGRAPHS=1. Unset it"
        ):
            check_compiler(torch.device("cuda"))


def test_model_without_layers_is_rejected_unless_stage_is_empty() -> None:
    from megatron.mpu.random import DropoutStreams

    head = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="found none in Linear"):
        compile_layers(head, DropoutStreams(), CPU, backend=BACKEND)
    compile_layers(head, DropoutStreams(), CPU, backend=BACKEND, is_full_model=False)


def test_compiler_error_propagates() -> None:
    def failing_backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such kernel")

    model = make_model("gpt2", **NO_DROPOUT)
    torch._dynamo.reset()
    compile_layers(model, model.parallel.streams, CPU, backend=failing_backend)
    with pytest.raises(Exception, match="no such kernel"):
        loss_and_grads(model)


class DoublingLayer(torch.nn.Module):
    """A layer that compiles at once: it has a feed-forward half and does not use it."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8)
def test_scheduled_lengths_compile_one_graph_per_length() -> None:
    """Torch stops at the ninth: an error here, else a warning behind which a layer runs as it is written."""
    torch._dynamo.reset()
    counters.clear()
    model: Any = make_model("gpt2", **NO_DROPOUT)
    layer = DoublingLayer(model.layers[0].mlp)
    compile_layers(layer, model.parallel.streams, CPU, backend="eager", num_lengths=10)
    for length in range(2, 12):
        layer(torch.zeros(length))
    assert counters["stats"]["unique_graphs"] == 10
