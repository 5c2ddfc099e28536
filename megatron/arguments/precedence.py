"""Which flags set the same thing under different names, so that a stronger source replaces all of them.

A flag of the command line replaces every key of a ``--config`` file and every flag of ``MEGATRON_DEFAULTS`` that sets
the same field, or a field that gives the same length in another unit.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.arguments.foreign_flags import foreign_flags
from megatron.arguments.scan import Scan

LENGTHS = (
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_warmup_iters", "lr_warmup_samples", "warmup"),
    ("lr_wsd_decay_iters", "lr_wsd_decay_samples", "wsd_decay_fraction"),
)
"""Groups of fields that give the same length; a fraction has no effect next to the others."""
FRACTIONS = ("warmup", "wsd_decay_fraction")
_SETTING = {name: names[0] for names in LENGTHS for name in names}


def setting_of(field: str) -> str:
    """Return the name that all fields for the same length share; of any other field its own name."""
    return _SETTING.get(field, field)


def settings_of_flag(flag: str) -> set[str]:
    """Return the settings that a converted flag determines."""
    return {setting_of(field) for field in foreign_flags()[flag].fields}


def _yields(flag: str) -> bool:
    """Return True for a converted flag that sets a field only if the field's own flag is missing."""
    row = foreign_flags().get(flag)
    return row is not None and row.yields


def yielding_fields(found: Scan) -> set[str]:
    """Return the fields of ``found.values`` that only a yielding flag has set."""
    fields = {field for flag in found.converted if _yields(flag) for field in foreign_flags()[flag].fields}
    typed = {field: found.spelling.get(field, "").split(" ")[0] for field in fields & found.values.keys()}
    return {field for field, flag in typed.items() if not flag or _yields(flag)}


def settings_of(found: Scan) -> set[str]:
    """Return the settings that the command line determines."""
    explicit = found.values.keys() - yielding_fields(found)
    converted = [flag for flag in found.converted if not _yields(flag)]
    return {setting_of(field) for field in explicit}.union(*map(settings_of_flag, converted))


def overridden_flags(converted: Iterable[str], found: Scan) -> list[str]:
    """Return the converted flags of a weaker source that the command line overrides."""
    settings = settings_of(found)
    return [flag for flag in converted if flag in found.converted or settings_of_flag(flag) & settings]


def shadowing_lengths(names: Iterable[str]) -> set[str]:
    """Return the lengths in steps and samples that would shadow one of ``names``, which a stronger source gives."""
    given = set(names)
    groups = [group for group in LENGTHS if given & set(group)]
    return {name for group in groups for name in group if name not in given and name not in FRACTIONS}
