"""ExpertMonitor: logs expert load balance and warns if a router collapses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.config.stability import StabilityConfig
from megatron.models.common.router import ExpertLoad
from megatron.training.callbacks.running_statistics import RunningStatistics
from megatron.training.step_result import StepResult
from megatron.training.trainer import Callback

MAX_TABLE_SIZE = 16_384
"""Largest table (layers x experts) that is written to records; 58 layers of 256 experts need 100 kB per record."""
MAX_NAMES = 3


class ExpertMonitor(Callback):
    """Logs the expert load over the global batch, by layer, and warns if a router collapses.

    A router has collapsed if the entropy of its experts' shares is closer to ln k (all tokens go to the same k of E
    experts) than to ln E (equal shares), both in this step and in the mean over the last ``--stability-window`` steps.
    As for the stability guard, at least half of the window must be filled; skipped steps and overflows do not count.
    A layer is reported once, and again only after its mean has recovered.

    Args:
        model: model settings.
    """

    def __init__(self, model: Any, settings: StabilityConfig) -> None:
        self.model, self.settings = model, settings
        num_experts, k = model.num_experts, model.moe_router_topk
        # With k = E the load is always even.
        self.entropy_limit = (1 + math.log(k) / math.log(num_experts)) / 2 if k < num_experts else 0.0
        self._load: ExpertLoad | None = None
        self.load_state_dict({})

    def on_after_update(self, result: StepResult) -> None:
        self._load = result.expert_load

    def on_log(self, metrics: dict[str, Any]) -> None:
        if self._load is not None:
            metrics |= load_metrics(self._load, has_capacity=self.model.moe_expert_capacity_factor > 0)

    def on_step_end(self, result: StepResult) -> None:
        """Report routers that have collapsed in this step."""
        if result.expert_load is None or result.is_skipped:
            return
        if collapsed := self.update_collapsed(result.expert_load):
            self.trainer.print_line(
                f"step {self.trainer.samples.step} | {self._warning(collapsed, result.expert_load)}"
            )

    def update_collapsed(self, load: ExpertLoad) -> dict[str, float]:
        """Record a step's load; return newly collapsed layer -> mean entropy divided by ln E."""
        newly_collapsed = {}
        for layer, entropy in zip(load.layers, load.entropy(), strict=True):
            statistics = self._entropies.setdefault(layer, RunningStatistics(self.settings.stability_window, 0.0))
            statistics.add(entropy)
            mean = statistics.mean()
            if mean < self.entropy_limit and entropy < self.entropy_limit and layer not in self._collapsed:
                self._collapsed.add(layer)
                newly_collapsed[layer] = mean
            elif self.entropy_limit <= mean < math.inf and layer in self._collapsed:
                self._collapsed.remove(layer)
                statistics.values.clear()  # wait for half a window, so that a mean near the limit is reported rarely
        return newly_collapsed

    def _warning(self, entropy_by_layer: Mapping[str, float], load: ExpertLoad) -> str:
        """Format the warning; ``entropy_by_layer`` has the collapsed layers' mean entropy, divided by ln E."""
        num_experts = self.model.num_experts
        worst = min(entropy_by_layer, key=entropy_by_layer.__getitem__)
        layers = sorted(entropy_by_layer, key=entropy_by_layer.__getitem__)[:MAX_NAMES]
        suffix = f" and {len(entropy_by_layer) - len(layers)} more" if len(entropy_by_layer) > len(layers) else ""
        imbalance = load.imbalance()[load.layers.index(worst)]
        num_steps = len(self._entropies[worst].values)
        return (
            f"router collapse: {', '.join(layers)}{suffix}: the mean entropy of {worst} over {num_steps} steps "
            f"corresponds to {num_experts ** entropy_by_layer[worst]:.1f} of {num_experts} experts; the most loaded "
            f"expert now has {imbalance:.2f} x the mean tokens. {self._advice()}"
        )

    def _advice(self) -> str:
        model = self.model
        if model.moe_router_enable_expert_bias:
            advice = f"Raise --moe-router-bias-update-rate ({model.moe_router_bias_update_rate:g})"
        elif model.has_aux_loss:
            advice = f"Raise --moe-aux-loss-coeff ({model.moe_aux_loss_coeff})"
        else:
            advice = "Add --moe-aux-loss-coeff 0.01"
        return f"{advice}, or lower --lr; docs/monitoring.md#experts"

    def state_dict(self) -> dict[str, Any]:
        entropies = {layer: list(statistics.values) for layer, statistics in self._entropies.items()}
        return {"entropies": entropies, "collapsed": sorted(self._collapsed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        window = self.settings.stability_window
        self._entropies = {
            layer: RunningStatistics(window, 0.0, values) for layer, values in state.get("entropies", {}).items()
        }
        self._collapsed = set(state.get("collapsed", ()))


def load_metrics(load: ExpertLoad, *, has_capacity: bool) -> dict[str, Any]:
    """Compute a record's values by layer; docs/monitoring.md has the formulas.

    Args:
        has_capacity: True if experts have a capacity, so that tokens may be dropped.
    """

    def by_layer(values: list[Any]) -> dict[str, Any]:
        return dict(zip(load.layers, values, strict=True))

    record = {"moe_load_imbalance": by_layer(load.imbalance()), "moe_entropy": by_layer(load.entropy())}
    if has_capacity:
        record["moe_dropped"] = by_layer(load.dropped_share())
    if load.tokens.numel() <= MAX_TABLE_SIZE:
        record["moe_tokens_per_expert"] = by_layer(load.tokens.tolist())
    return record
