"""--compile: each layer by torch.compile."""

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

# ``--compile``: each transformer layer by ``torch.compile``, without and with a pipeline, recomputed or not.
#
# A layer is compiled, not the model: all layers of a kind share one graph, so that the time to start does not grow with
# their number, and a pipeline, recompute, ZeRO and checkpoints see the modules that they know. Dropout of hidden states
# is an operator (``megatron.mpu.fused_dropout``), so that a layer stays one graph. What drops attention probabilities
# runs outside of the graphs, which break there: a keyed generator would be replaced by a graph's own. A layer's number
# is part of all keys; as a number in Python it would be compiled in, one graph for each layer, so it becomes a tensor.

OUTSIDE = ("attend", "recomputed")
"""Methods of ``DropoutStreams`` at which graphs break."""
COMPILERS = ("g++", "clang++")
GRAPHS_OF_A_LENGTH = 8
"""Torch's own limit, behind which a layer would run as it is written; at most as many for each length of a schedule."""


def compile_layers(
    module: torch.nn.Module,
    streams: DropoutStreams,
    device: torch.device,
    *,
    has_all: bool = True,
    num_lengths: int = 1,
    backend: str | Callable[..., Any] = "inductor",
) -> None:
    """Have each transformer layer of ``module``, one with a feed-forward half, compiled at its first forward.

    Args:
        has_all: the module is the whole model; a stage of a pipeline may be without a layer.
        num_lengths: of sequences that will come; there is a graph for each.

    Raises:
        ConfigError: there is nothing to compile, or no compiler.
    """
    layers = [each for each in module.modules() if isinstance(getattr(each, "mlp", None), MLP)]
    if not layers and has_all:
        raise ConfigError(
            f"--compile compiles modules with a child `mlp` of megatron.models.common.transformer.MLP, got none in "
            f"{type(module).__name__}. Leave it out, or compile your layers in model_provider"
        )
    if backend == "inductor":
        check_compiler(device)
    streams.enter_graphs()
    for name in OUTSIDE:
        setattr(streams, name, torch.compiler.disable(getattr(streams, name)))
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS_OF_A_LENGTH * num_lengths)
    for layer in layers:
        for part in layer.modules():
            if isinstance(getattr(part, "layer", None), int):
                part.layer = torch.tensor(part.layer)  # type: ignore[assignment]
        layer.compile(backend=backend, dynamic=False)
    kinds = sorted({type(layer).__name__ for layer in layers})
    log.info(f"torch.compile: {len(layers)} layers here ({', '.join(kinds)}); the first step waits for it")


def check_compiler(device: torch.device) -> None:
    """Check that torch.compile will find what makes kernels of its graphs, and makes no CUDA graphs of them.

    A CUDA graph writes its results to the same places each time, from the first forward behind any backward on. So it
    would write over activations of other micro-batches in flight, and over gradients that add up.

    Raises:
        ConfigError: a CPU without a C++ compiler, a GPU without Triton, or the user has asked for CUDA graphs.
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
            "--compile must be without CUDA graphs, which write over activations of micro-batches in flight, got "
            "TORCHINDUCTOR_CUDAGRAPHS=1. Unset it, or leave --compile out"
        )
