"""Reports which modules a program with megatron-core can import, and where its tensors are stored."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import megatron.core
import torch
import torch.distributed as dist


def main(rank: int, folder: Path, words: list[str], failing_rank: int) -> None:
    """Write the report of this rank; ``failing_rank`` then raises ZeroDivisionError."""
    total = torch.tensor([rank + 1.0], device="cuda")
    dist.all_reduce(total)
    index = torch.device("cuda", 0)
    tensors = [total, torch.zeros(1).cuda(), torch.zeros(1).to(index), torch.empty(1, device=index)]
    try:
        importlib.import_module("megatron.mpu")
        has_our_package = True
    except ModuleNotFoundError:
        has_our_package = False
    report = {
        "core": megatron.core.__file__,
        "has_our_package": has_our_package,
        "words": words,
        "sum": total.item(),
        "type": torch.zeros(1).type(),
        "devices": [tensor.device.type for tensor in tensors],
    }
    (folder / f"{rank}.json").write_text(json.dumps(report))
    if rank == failing_rank:
        total /= rank // 0
