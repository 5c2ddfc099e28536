"""StabilityConfig: guard against anomalous steps, and the replica check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.option import option

if TYPE_CHECKING:
    pass


GUARDS = ("off", "skip", "rollback")
DRIFT_INTERVAL = 100


@dataclass(frozen=True, kw_only=True)
class StabilityConfig:
    """Guard against anomalous steps, and comparison of the copies of each weight."""

    stability_guard: str = option(
        "off",
        "reaction to a step whose loss or gradient norm is not finite, or far above those of previous steps: off: "
        "end the run (not finite) or only warn (far above); skip: skip the update on all ranks; rollback: skip, "
        "and after --stability-patience skipped steps in a row return to a good checkpoint and skip the data since",
        choices=GUARDS,
    )
    stability_sigma: float = option(
        6.0, "standard deviations above the mean of the previous steps that count as far above", above=0
    )
    stability_window: int = option(
        128, "number of good previous steps in the mean; at least half of them must exist", minimum=4
    )
    stability_patience: int = option(
        5, "skipped steps in a row until skip ends the run and rollback returns to a checkpoint", minimum=1
    )
    drift_interval: int = option(
        DRIFT_INTERVAL,
        "steps between comparisons of all copies of each weight on replicas, tensor ranks and stages; 0: never",
        minimum=0,
        aliases=("--check-weight-hash-across-dp-replicas-interval",),
    )

    @property
    def is_guarded(self) -> bool:
        """True if anomalous steps are skipped."""
        return self.stability_guard != "off"

    @property
    def rolls_back(self) -> bool:
        """True if consecutive anomalous steps cause a rollback to a checkpoint."""
        return self.stability_guard == "rollback"
