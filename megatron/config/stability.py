"""StabilityConfig: the guard against anomalous steps and the check of replicas."""

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
        "what is done about a step whose loss or gradient norm is not finite or far above the steps before it: off "
        "ends the run (not finite) or only says so (far above); skip leaves the step out on all ranks; rollback does "
        "so too, and after --stability-patience in a row goes back to a good checkpoint and leaves their data out",
        choices=GUARDS,
    )
    stability_sigma: float = option(
        6.0, "standard deviations above the mean of the last steps from which a loss or norm is far above", above=0
    )
    stability_window: int = option(128, "good steps that count as the last ones; half of them must be there", minimum=4)
    stability_patience: int = option(
        5, "bad steps in a row after which --stability-guard skip ends the run and rollback goes back", minimum=1
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
    def goes_back(self) -> bool:
        """True if consecutive anomalous steps cause a rollback to a checkpoint."""
        return self.stability_guard == "rollback"
