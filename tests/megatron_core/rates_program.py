"""Computes learning rates and weight decays with megatron-core's scheduler for sets of Megatron-LM's flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


class ParamGroups:
    """An optimizer that has only parameter groups."""

    def __init__(self, *groups: dict[str, Any]) -> None:
        self.param_groups = list(groups)


def main(rank: int, folder: Path) -> None:
    """Read sets of flags from ``flags.json``; write the rates of two parameter groups by position to ``rates.json``.

    The second group has the rates of --decoupled-lr. A position is a number of completed steps.
    """
    sets = json.loads((folder / "flags.json").read_text())
    (folder / "rates.json").write_text(json.dumps([compute_rates(flags) for flags in sets]))


def compute_rates(flags: dict[str, Any]) -> list[list[float]]:
    """Return [rate, rate of the decoupled group, weight decay] at each of ``flags["positions"]``.

    Lengths are converted to samples as in ``get_optimizer_param_scheduler`` of megatron/training/training.py.
    """
    batch = flags["global_batch_size"]
    if "train_iters" in flags:
        decay, warmup = (
            flags.get("lr_decay_iters", flags["train_iters"]) * batch,
            flags.get("lr_warmup_iters", 0) * batch,
        )
        wsd = flags["lr_wsd_decay_iters"] * batch if "lr_wsd_decay_iters" in flags else None
    else:
        decay, warmup = flags.get("lr_decay_samples", flags["train_samples"]), flags.get("lr_warmup_samples", 0)
        wsd = flags.get("lr_wsd_decay_samples")
    if "lr_warmup_fraction" in flags:
        warmup = flags["lr_warmup_fraction"] * decay
    decoupled = {"max_lr": flags.get("decoupled_lr", flags["lr"])}
    if "decoupled_min_lr" in flags:
        decoupled["min_lr"] = flags["decoupled_min_lr"]
    length = flags["train_iters"] * batch if "train_iters" in flags else flags["train_samples"]
    optimizer = ParamGroups({}, decoupled)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=flags.get("lr_warmup_init", 0.0), max_lr=flags["lr"], min_lr=flags["min_lr"],
        lr_warmup_steps=warmup, lr_decay_steps=decay, lr_decay_style=flags["lr_decay_style"],
        start_wd=flags.get("start_weight_decay", 0.01), end_wd=flags.get("end_weight_decay", 0.01),
        wd_incr_steps=length,
        wd_incr_style=flags.get("weight_decay_incr_style", "constant"), wsd_decay_steps=wsd,
        lr_wsd_decay_style=flags.get("lr_wsd_decay_style", "exponential"),
    )  # fmt: skip
    rates = []
    for position in flags["positions"]:
        scheduler.step(position * batch - scheduler.num_steps)
        rates.append([*(group["lr"] for group in optimizer.param_groups), optimizer.param_groups[0]["weight_decay"]])
    return rates
