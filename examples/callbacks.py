"""Callbacks of your own, for any run: bash run_gpt2.sh --callback examples/callbacks.py:WeightNorm

docs/own_model.md describes them; the hooks are listed in megatron/training/trainer.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron.training import Callback


class WeightNorm(Callback):
    """Logs the norm of the weights of this stage, and stops the run above a limit."""

    def on_log(self, metrics: dict[str, Any]) -> None:
        weights = [parameter.detach().float().norm() for parameter in self.trainer.engine.module.parameters()]
        metrics["weight_norm"] = torch.stack(weights).norm().item()
        if metrics["weight_norm"] > 1000.0:
            self.trainer.stop.request("the weights are too large")


class BestLoss(Callback):
    """Logs the lowest logged loss of the run. Its state is saved, so that a resumed run continues with it."""

    def __init__(self) -> None:
        self.loss = math.inf

    def on_log(self, metrics: dict[str, Any]) -> None:
        self.loss = min(self.loss, metrics["loss"])
        metrics["best_loss"] = self.loss

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss = state["loss"]
