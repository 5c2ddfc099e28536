"""A pipeline of tds whose layers wait for the whole device and give cached memory back, in the midst of messages.

    torchrun --nproc-per-node 2 benchmarks/gpu/workers/pause.py FILE BACKEND SCHEDULE {plain,pause}

Rank 0 writes the losses to FILE as JSON. On a CPU the pause does nothing. BACKEND is nccl, gloo on a CPU, or
host_copies, by which two ranks can share a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

if torch.cuda.device_count() == 1:
    os.environ["LOCAL_RANK"] = "0"  # both stages on the one GPU; ahead of DeepSpeed, which reads it

import tds as deepspeed  # noqa: E402

STEPS, MICRO_BATCHES, WIDTH, LAYERS = 6, 8, 256, 8


class Paused(torch.nn.Module):
    """A layer that, if ``pauses``, waits for all that its device was given, and frees what is cached, on both ways."""

    def __init__(self, width: int, *, pauses: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.pauses = pauses and torch.cuda.is_available()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(self.linear(x))
        if self.pauses:
            pause()
            if y.requires_grad:
                y.register_hook(lambda gradient: pause())
        return y


def pause() -> None:
    """Wait for the device, those kernels included that wait for a message, and free what torch caches."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def main() -> None:
    """Train; every rank takes part."""
    file, backend, schedule, kind = sys.argv[1:]
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if backend == "host_copies":
        from tds.p2p import host_copies

        host_copies.register()
    torch.distributed.init_process_group(backend)
    deepspeed.init_distributed(dist_backend=backend)
    torch.manual_seed(0)
    layers = [Paused(WIDTH, pauses=kind == "pause") for _ in range(LAYERS)]
    module = deepspeed.PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "pipeline": {"schedule": schedule, "timeout_s": 40},
    }
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=torch.optim.SGD(module.parameters(), lr=5.0), config=config
    )
    data = deepspeed.utils.RepeatingLoader(
        [(torch.randn(4, WIDTH), torch.randn(4, WIDTH)) for _ in range(MICRO_BATCHES)]
    )
    losses = [float(engine.train_batch(data)).hex() for _ in range(STEPS)]
    if torch.distributed.get_rank() == 0:
        Path(file).write_text(json.dumps(losses))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
