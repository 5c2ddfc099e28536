"""Reports which modules a program with megatron-core can import, and where its tensors are stored."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import megatron.core
import torch
import torch.distributed as dist


def main(rank: int, folder: Path, words: list[str], failing_rank: int = -1) -> None:
    """Write the report of this rank, or raise ZeroDivisionError on ``failing_rank``."""
    total = torch.tensor([rank + 1.0], device="cuda")
    if rank == failing_rank:
        total /= 1 // 0
    if failing_rank < 0:
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
        "ours": has_our_package,
        "words": words,
        "sum": total.item(),
        "type": torch.zeros(1).type(),
        "devices": [tensor.device.type for tensor in tensors],
    }
    (folder / f"{rank}.json").write_text(json.dumps(report))
