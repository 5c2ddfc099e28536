"""ExpertMonitor: how evenly each layer's tokens go to its experts, and a warning where a router collapses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.config.stability import StabilityConfig
from megatron.models.common.router import ExpertLoad
from megatron.training.callbacks.running_statistics import RunningStatistics
from megatron.training.step_result import StepResult
from megatron.training.trainer import Callback

MOST_NUMBERS = 16_384
"""Layers x experts of a table that goes into records: of 58 layers with 256 experts each, a record has some 100 kB."""
NAMED_AT_MOST = 3


class ExpertMonitor(Callback):
    """Logs by layer what routers have chosen in the global batch of a step, and tells when one of them collapses.

    A router has collapsed where the mean entropy of its experts' shares over the last ``--stability-window`` steps
    lies nearer to ln k, all tokens going to the same k of E experts, than to ln E, all experts getting as many, and
    so does that of the step itself. Half of the steps must be there, as for the guard; those that were left out or
    overflowed do not count. It is told once, and again only after the mean has been on the other side.

    Args:
        model: settings of the model.
    """

    def __init__(self, model: Any, settings: StabilityConfig) -> None:
        self.model, self.settings = model, settings
        number, k = model.num_experts, model.moe_router_topk
        self.limit = (1 + math.log(k) / math.log(number)) / 2 if k < number else 0.0  # all experts: even at any time
        self._load: ExpertLoad | None = None
        self.load_state_dict({})

    def on_after_update(self, result: StepResult) -> None:
        self._load = result.expert_load

    def on_log(self, metrics: dict[str, Any]) -> None:
        if self._load is not None:
            metrics |= values_of(self._load, drops=self.model.moe_expert_capacity_factor > 0)

    def on_step_end(self, result: StepResult) -> None:
        """Tell which routers have collapsed with this step."""
        if result.expert_load is None or result.is_skipped:
            return
        if found := self.collapsing(result.expert_load):
            self.trainer.print_line(f"step {self.trainer.samples.step} | {self._text(found, result.expert_load)}")

    def collapsing(self, load: ExpertLoad) -> dict[str, float]:
        """Take note of a step; return the layers that have collapsed with it, with their mean entropy over ln E."""
        found = {}
        for layer, entropy in zip(load.layers, load.entropy(), strict=True):
            seen = self._seen.setdefault(layer, RunningStatistics(self.settings.stability_window, 0.0))
            seen.add(entropy)
            mean = seen.mean()
            if mean < self.limit and entropy < self.limit and layer not in self._collapsed:
                self._collapsed.add(layer)
                found[layer] = mean
            elif self.limit <= mean < math.inf and layer in self._collapsed:
                self._collapsed.remove(layer)
                seen.values.clear()  # it must be there for half a window again: a mean at the limit is told seldom
        return found

    def _text(self, found: Mapping[str, float], load: ExpertLoad) -> str:
        number = self.model.num_experts
        worst = min(found, key=found.__getitem__)
        named = sorted(found, key=found.__getitem__)[:NAMED_AT_MOST]
        more = f" and {len(found) - len(named)} more" if len(found) > len(named) else ""
        imbalance = load.imbalance()[load.layers.index(worst)]
        steps = len(self._seen[worst].values)
        return (
            f"router collapse: {', '.join(named)}{more}: the entropy of {worst} is that of "
            f"{number ** found[worst]:.1f} of {number} experts, the mean of {steps} steps; now the largest has "
            f"{imbalance:.2f} x the mean tokens. {self._advice()}"
        )

    def _advice(self) -> str:
        model = self.model
        if model.moe_router_enable_expert_bias:
            what = f"Raise --moe-router-bias-update-rate ({model.moe_router_bias_update_rate:g})"
        elif model.has_aux_loss:
            what = f"Raise --moe-aux-loss-coeff ({model.moe_aux_loss_coeff:g})"
        else:
            what = "Add --moe-aux-loss-coeff 0.01"
        return f"{what}, or lower --lr; docs/seeing.md#experts"

    def state_dict(self) -> dict[str, Any]:
        entropies = {layer: list(each.values) for layer, each in self._seen.items()}
        return {"entropies": entropies, "collapsed": sorted(self._collapsed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        window = self.settings.stability_window
        self._seen = {
            layer: RunningStatistics(window, 0.0, values) for layer, values in state.get("entropies", {}).items()
        }
        self._collapsed = set(state.get("collapsed", ()))


def values_of(load: ExpertLoad, *, drops: bool) -> dict[str, Any]:
    """Return the values of a record, by layer: docs/seeing.md has each with its formula.

    Args:
        drops: experts have a capacity.
    """

    def by_layer(values: list[Any]) -> dict[str, Any]:
        return dict(zip(load.layers, values, strict=True))

    found = {"moe_load_imbalance": by_layer(load.imbalance()), "moe_entropy": by_layer(load.entropy())}
    if drops:
        found["moe_dropped"] = by_layer(load.dropped_share())
    if load.tokens.numel() <= MOST_NUMBERS:
        found["moe_tokens_per_expert"] = by_layer(load.tokens.tolist())
    return found
