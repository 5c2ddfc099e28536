"""Settings whose default has changed or depends on a run's origin, and the values that resumed runs keep.

A run stores every setting's resolved value in ``config.json`` and in its checkpoints. If the run is resumed, or
repeated from its ``config.json``, the saved values for settings in ``CHANGED_DEFAULTS`` replace the new defaults. A
saved configuration without such a setting is older than the setting, so the former default applies.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple


class ChangedDefault(NamedTuple):
    """A setting with a new default.

    Attributes:
        section: configuration section, such as ``"optimizer"``.
        field: field in that section.
        former: value in runs whose saved configuration has no such field.
        optimizer: the only optimizer that uses the field; "" if every run uses it.
        is_reported: ``describe_saved_settings`` includes the setting; False if the code that resolves the setting
            reports it instead.
    """

    section: str
    field: str
    former: Any
    optimizer: str = ""
    is_reported: bool = True


CHANGED_DEFAULTS: tuple[ChangedDefault, ...] = (
    ChangedDefault("optimizer", "lr_warmup_rounding", "down"),
    ChangedDefault("optimizer", "train_tokens_lr_unit", "steps"),
    ChangedDefault("optimizer", "lr_step_offset", 0),  # -1 in runs that continue a checkpoint of Megatron-LM
    ChangedDefault("model", "loss_average", "token"),
    ChangedDefault("optimizer", "sgd_momentum", 0.0, "sgd"),
    ChangedDefault("optimizer", "muon_momentum", 0.95, "muon"),
    ChangedDefault("optimizer", "muon_nesterov", True, "muon"),
    ChangedDefault("optimizer", "muon_scale_mode", "match_rms_adamw", "muon"),
    ChangedDefault("optimizer", "muon_coefficient_type", "simple", "muon"),
    ChangedDefault("optimizer", "muon_fp32_matmul_prec", "bf16", "muon"),
    ChangedDefault("data", "eod_token", "by-name", is_reported=False),  # reported by training/end_of_document.py
)
"""One row per setting. A row must stay as long as checkpoints from before its change must load."""


def former_defaults(saved: Mapping[str, Any], sections: Container[str] | None = None) -> dict[str, Any]:
    """Return field -> former default for settings in the table that are missing in the saved configuration.

    Args:
        saved: ``Config.to_dict()`` as saved by any version.
        sections: the sections to search; None for all.
    """
    rows = [row for row in CHANGED_DEFAULTS if sections is None or row.section in sections]
    return {row.field: row.former for row in rows if row.field not in _section(saved, row)}


def saved_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return field -> value used by the saved run, for every setting in the table."""
    return {row.field: _section(saved, row).get(row.field, row.former) for row in CHANGED_DEFAULTS}


def describe_saved_settings(
    saved_values: Mapping[str, Any], defaults: Mapping[str, Any], optimizer: str | None = None
) -> Iterator[str]:
    """Yield "--flag value (a new run: default)" for saved settings that differ from a new run's default.

    Args:
        optimizer: the run's optimizer; other optimizers' settings are skipped. None to describe all.
    """
    left_out = {row.field for row in CHANGED_DEFAULTS if not row.is_reported}
    if optimizer is not None:
        left_out |= {row.field for row in CHANGED_DEFAULTS if row.optimizer not in ("", optimizer)}
    for field, value in saved_values.items():
        if value != defaults[field] and field not in left_out:
            yield f"{field.replace('_', '-')} {value} (a new run: {defaults[field]})"


def _section(saved: Mapping[str, Any], row: ChangedDefault) -> Mapping[str, Any]:
    section = saved.get(row.section, {})
    return section if isinstance(section, Mapping) else {}
