"""What the process that forks runs imports once, so that no start pays for it."""

from __future__ import annotations

import importlib

MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.agent.server.api",
    "torch.utils.tensorboard",
    "deepspeed",
    "megatron.training.train",
    "megatron.checkpoint.dcp",
    "pretrain_gpt2",
)


def preload() -> None:
    """Import them, on one thread."""
    for name in MODULES:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
