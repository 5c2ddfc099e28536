"""torch.compile of the transformer layers (--compile)."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

from megatron import log
from megatron.errors import ConfigError
from megatron.models.common.transformer import MLP
from megatron.mpu.random import DropoutStreams

# torch.compile is applied to each layer, not to the model, with or without a pipeline or recompute. All layers of a
# type share one graph, so the start-up time does not grow with their number. Pipeline, recompute, ZeRO and checkpoints
# use the original modules. Dropout of hidden states is an operator (``megatron.mpu.fused_dropout``), so that a layer
# stays one graph.
#
# Dropout of attention probabilities causes a graph break, because a graph would replace the keyed generator by its own.
# The layer index is part of all dropout keys. It is converted to a tensor, because torch.compile would specialise the
# graph on a Python int and compile one graph per layer.

GRAPH_BREAK_METHODS = ("attend", "recompute")
"""Methods of ``DropoutStreams`` at which graphs break."""
COMPILERS = ("g++", "clang++")
GRAPHS_PER_LENGTH = 8
"""Number of graphs per sequence length (torch's default limit), beyond which a layer would run uncompiled."""
NO_SLP = "-fno-tree-slp-vectorize"
"""Flag of g++ and clang++ against superword-level parallelism, the vectorization of straight-line code."""


def compile_layers(
    module: torch.nn.Module,
    streams: DropoutStreams,
    device: torch.device,
    *,
    is_full_model: bool = True,
    num_lengths: int = 1,
    backend: str | Callable[..., Any] = "inductor",
) -> None:
    """Set up each transformer layer of ``module`` to be compiled at its first forward.

    A transformer layer is a module with a feed-forward block ``mlp``.

    Args:
        is_full_model: the module is the full model; a pipeline stage may have no transformer layer.
        num_lengths: sequence lengths in the run; each needs a separate graph.

    Raises:
        ConfigError: there is no layer to compile, or no compiler.
    """
    layers = [child for child in module.modules() if isinstance(getattr(child, "mlp", None), MLP)]
    if not layers and is_full_model:
        raise ConfigError(
            "--compile needs layers with a child `mlp` of type megatron.models.common.transformer.MLP, found none in "
            f"{type(module).__name__}. Leave it out, or compile your layers in model_provider"
        )
    if backend == "inductor":
        check_compiler(device)
        if device.type == "cpu":
            avoid_miscompiled_transposes()
    streams.enable_graph_dropout()
    for name in GRAPH_BREAK_METHODS:
        setattr(streams, name, torch.compiler.disable(getattr(streams, name)))
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS_PER_LENGTH * num_lengths)
    for layer in layers:
        for submodule in layer.modules():
            if isinstance(getattr(submodule, "layer", None), int):
                submodule.layer = torch.tensor(submodule.layer)  # type: ignore[assignment]
        layer.compile(backend=backend, dynamic=False)
    layer_types = sorted({type(layer).__name__ for layer in layers})
    log.info(f"torch.compile: {len(layers)} layers ({', '.join(layer_types)}), compiled in the first step")


def check_compiler(device: torch.device) -> None:
    """Check that torch.compile has a compiler for its kernels, and that CUDA graphs are off.

    A CUDA graph writes its outputs to the same memory in every replay. It would overwrite the activations of other
    micro-batches in flight, and accumulated gradients.

    Raises:
        ConfigError: a CPU without a C++ compiler, a GPU without Triton, or the user has enabled CUDA graphs.
    """
    from torch._inductor import config as inductor

    if device.type == "cpu":
        names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
        if not any(shutil.which(name) for name in names):
            raise ConfigError(
                f"--compile on a CPU needs a C++ compiler, found none of {', '.join(names)}. Install g++ or set CXX, "
                "or leave --compile out"
            )
        return
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError("--compile on a GPU needs Triton, which is not installed. Install it, or leave --compile out")
    if inductor.triton.cudagraphs:
        raise ConfigError(
            "--compile does not support CUDA graphs, which overwrite the activations of micro-batches in flight, got "
            "TORCHINDUCTOR_CUDAGRAPHS=1. Unset it, or leave --compile out"
        )


def avoid_miscompiled_transposes() -> None:
    """Add ``NO_SLP`` to the compiler flags for all C++ kernels that torch.compile builds later in this process.

    torch 2.13 compiles with -O3. With that, g++ 12.2 miscompiles AVX-512 kernels that transpose two 16-bit matrices,
    such as the gradient of a gated feed-forward layer's ``up`` weight: some entries of the result are uninitialised.
    -O2 or ``NO_SLP`` avoids it. The flag applies to all kernels, because others with transposes may be affected.

    torch has no setting for additional flags. The setting used here becomes part of the compiler's command line, as
    ``-ffp-contract={value}``, and of torch's cache keys, so that no kernel built without ``NO_SLP`` is loaded.
    """
    from torch._inductor import config as inductor

    if NO_SLP not in inductor.cpp.enable_floating_point_contract_flag.split():
        inductor.cpp.enable_floating_point_contract_flag += f" {NO_SLP}"
