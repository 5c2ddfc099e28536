"""Where time goes: seconds of each layer alone, and Python's own profile of a step."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.pipe.model import Batch, Model

REPEATS = 5
NUM_LINES = 40


def seconds_of_layers(chain: nn.Module, model: Model, batch: Batch) -> list[float]:
    """Return seconds of forward and backward of each layer for one micro-batch; the loss counts to the last."""
    layers = list(chain.children())
    rounds = []
    for _ in range(REPEATS + 1):
        x, labels = batch
        seconds = []
        for index, layer in enumerate(layers):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x = x.detach().requires_grad_()
            is_last = index == len(layers) - 1
            start = time.perf_counter()
            y = layer(x)
            out = model.loss_fn(y, labels) if is_last else y
            middle = time.perf_counter()
            gradient = torch.ones_like(out)
            after = time.perf_counter()
            out.backward(gradient)
            seconds.append(middle - start + time.perf_counter() - after)
            x = y
        rounds.append(seconds)
    for parameter in chain.parameters():
        parameter.grad = None
    return [statistics.median(each) for each in zip(*rounds[1:], strict=True)]


def seconds_by_profile(module: Any) -> list[float]:
    """Return seconds of each layer as our engine measures them to cut by, the medians of several looks. Collective."""
    rounds = [[layer.total_s for layer in module._profiled_cut().layers] for _ in range(REPEATS)]
    return [statistics.median(each) for each in zip(*rounds, strict=True)]


def hot_spots(run: Callable[[], Any]) -> str:
    """Return the functions in which ``run`` spends most time of its own, as a table."""
    profile = cProfile.Profile()
    profile.runcall(run)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(NUM_LINES)
    return text.getvalue()
