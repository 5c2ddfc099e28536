"""What a run does about steps whose numbers are wrong, and how it looks for copies of weights that have drifted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.option import option

if TYPE_CHECKING:
    from megatron.config.config import Config

GUARDS = ("off", "skip", "rollback")
DRIFT_INTERVAL = 100


@dataclass(frozen=True, kw_only=True)
class StabilityConfig:
    """The guard against bad steps, and the comparison of copies."""

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
    )

    @property
    def is_guarded(self) -> bool:
        """True where bad steps are skipped."""
        return self.stability_guard != "off"

    @property
    def goes_back(self) -> bool:
        """True where bad steps in a row lead back to a checkpoint."""
        return self.stability_guard == "rollback"


def stability_problems(config: Config) -> Iterator[str]:
    """Yield what cannot act, or cannot work without another flag."""
    stability, checkpoint = config.stability, config.checkpoint
    if "stability_patience" in config.given and not stability.is_guarded:
        yield (
            "--stability-patience acts with --stability-guard skip or rollback only, got --stability-guard off. Leave "
            "it out, or add --stability-guard"
        )
    has_saves = checkpoint.save_interval or checkpoint.minutes
    if stability.goes_back and not has_saves and not checkpoint.eval_only:
        yield (
            "--stability-guard rollback goes back to a checkpoint of this run, got --save-interval-minutes 0: there is "
            "none before the end. Add --save-interval N, or use --stability-guard skip"
        )


def stability_notes(config: Config, world_size: int) -> Iterator[str]:
    """Yield what was given, cannot act, and does no harm."""
    if "drift_interval" in config.given and config.stability.drift_interval and world_size == 1:
        yield "--drift-interval has no effect on one rank: there are no copies to compare"
