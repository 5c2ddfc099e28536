"""The result of a layout check, with its log line and proof.json entry. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

OK, FAILED, NOT_CHECKED = "ok", "failed", "not checked"
BOUNDS = {"first_loss": 1e-12, "loss": 1e-12, "first_norm": 1e-12, "gradient": 1e-11}
"""Largest differences from one process in fp64: losses absolute, the norm and the gradients relative."""


@dataclass(frozen=True)
class CheckResult:
    """The result of a layout check.

    Args:
        state: ``OK``, ``FAILED`` or ``NOT_CHECKED``.
        reason: why the check failed, or why nothing was checked; "" if it is ok.
        worst_gradient: parameter whose gradient has the largest relative difference.
        gradient: that difference.
        num_ranks: processes that were compared with a single one.
        model: description of the small model.
        notes: differences from the run's layout.
        uncovered: parts of the run that a check in fp64 on CPUs cannot cover.
        seconds: check duration.
    """

    state: str
    reason: str = ""
    worst_gradient: str = ""
    gradient: float = 0.0
    first_loss: float = 0.0
    loss: float = 0.0
    first_norm: float = 0.0
    num_ranks: int = 0
    model: str = ""
    notes: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Convert the fields to JSON-serializable values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CheckResult:
        """Build a result from the fields in ``values``; unknown fields are ignored."""
        known = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        for name in ("notes", "uncovered"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)

    def line(self) -> str:
        """Format the log line."""
        if self.state == NOT_CHECKED:
            return f"layout check: not checked, {self.reason}"
        details = f"{self.num_ranks} ranks, {self.model}, fp64"
        notes = "".join(f"; {note}" for note in self.notes)
        uncovered = f"; not covered: {', '.join(self.uncovered)}" if self.uncovered else ""
        verdict = "ok" if self.state == OK else f"FAILED: {self.reason}"
        return f"layout check: worst gradient {self.gradient:.1e}, {verdict} ({details}{notes}{uncovered})"


def bound_problems(differences: dict[str, float], worst_gradient: str, num_expert_tokens: int) -> list[str]:
    """Describe each difference that exceeds its bound.

    Args:
        differences: name in ``BOUNDS`` -> difference.
        worst_gradient: gradient with the largest difference.
        num_expert_tokens: expert token counts that differ.
    """
    names = {
        "gradient": f"gradient of {worst_gradient}",
        "first_norm": "gradient norm",
        "first_loss": "loss of the first step",
        "loss": "losses",
    }
    problems = [
        f"{text} off by {differences[name]:.1e} (allowed {BOUNDS[name]:.0e})"
        for name, text in names.items()
        if not differences[name] <= BOUNDS[name]  # also true for nan
    ]
    if num_expert_tokens:
        problems.append(f"{num_expert_tokens} token counts of experts differ")
    return problems
