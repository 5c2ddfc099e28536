"""Related fields: a source that sets one of them also replaces the others in weaker sources.

Fields are related if they set the same thing under different names or in different units, such as a length in steps and
in samples, or if a run can have only one of them, such as ``--data-path`` and ``--train-data-path``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron.arguments.derived_sizes import GLOBAL_BATCH_FIELD
from megatron.arguments.foreign_flags import foreign_flags
from megatron.arguments.scan import Scan
from megatron.config.data import PATHS, SPLIT_PATH_FIELDS

LENGTHS = (
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_warmup_iters", "lr_warmup_samples", "warmup"),
    ("lr_wsd_decay_iters", "lr_wsd_decay_samples", "wsd_decay_fraction"),
)
"""Groups of fields for the same length. A fraction has no effect if another field of its group is set."""
FRACTIONS = ("warmup", "wsd_decay_fraction")
_SETTING = {name: names[0] for names in LENGTHS for name in names}


def setting_of(field: str) -> str:
    """Map the fields for one length to a shared name, and any other field to itself."""
    return _SETTING.get(field, field)


def settings_of_flag(flag: str) -> set[str]:
    """Find the settings that a converted flag determines."""
    return {setting_of(field) for field in foreign_flags()[flag].fields}


def _is_fallback(flag: str) -> bool:
    """Return True for a converted flag that applies only if the field's own flag is missing."""
    row = foreign_flags().get(flag)
    return row is not None and row.is_fallback


def fallback_fields(scanned: Scan) -> set[str]:
    """Find the fields in ``scanned.values`` that were set only by a flag that yields to the field's own flag."""
    fields = {field for flag in scanned.converted if _is_fallback(flag) for field in foreign_flags()[flag].fields}
    typed = {field: scanned.spelling.get(field, "").split(" ")[0] for field in fields & scanned.values.keys()}
    return {field for field, flag in typed.items() if not flag or _is_fallback(flag)}


def settings_of(scanned: Scan) -> set[str]:
    """Collect the settings that the command line determines."""
    explicit = scanned.values.keys() - fallback_fields(scanned)
    converted = [flag for flag in scanned.converted if not _is_fallback(flag)]
    return {setting_of(field) for field in explicit}.union(*map(settings_of_flag, converted))


def overridden_flags(converted: Iterable[str], scanned: Scan) -> list[str]:
    """Find converted flags in a weaker source that the command line overrides."""
    settings = settings_of(scanned)
    return [flag for flag in converted if flag in scanned.converted or settings_of_flag(flag) & settings]


def shadowing_lengths(names: Iterable[str]) -> set[str]:
    """Find the fields that set the same lengths as ``names`` in other units; weaker sources must not set them.

    Args:
        names: fields that the stronger source sets.
    """
    stronger = set(names)
    groups = [group for group in LENGTHS if stronger & set(group)]
    return {name for group in groups for name in group if name not in stronger and name not in FRACTIONS}


EXCLUSIVE = (
    (("data_path", "split", "split_by"), SPLIT_PATH_FIELDS),
    (("sft", "valid_sft", "chat_template", "sft_overlong"), ("data_path", *SPLIT_PATH_FIELDS)),
    (("tokenizer_path",), ("vocab_file", "merge_file")),
    (("load",), ("resume",)),
)
"""Pairs of groups of fields that exclude each other."""
BATCH_SIZE_FIELDS = (GLOBAL_BATCH_FIELD, "batch_size", "gas")
"""Batch sizes, each of which follows from the other two."""


def fields_replaced_in_file(values: Mapping[str, Any], command_line: Mapping[str, Any]) -> Iterator[str]:
    """Find fields in a ``--config`` file that related command-line fields replace.

    Args:
        values: field -> value of the file.
        command_line: field -> value of the command line.
    """
    replaced = set()
    for pair in EXCLUSIVE:
        for group, other in (pair, pair[::-1]):
            if any(name in command_line for name in other) and not any(name in command_line for name in group):
                replaced |= {name for name in group if name in values}
    merged = {**values, **command_line}
    explicit_sizes = [name for name in BATCH_SIZE_FIELDS if name in command_line]
    if explicit_sizes and all(merged.get(name) for name in BATCH_SIZE_FIELDS):
        replaced.add(
            {GLOBAL_BATCH_FIELD: "gas", "batch_size": "gas", "gas": "batch_size"}[explicit_sizes[0]]
            if len(explicit_sizes) == 1
            else GLOBAL_BATCH_FIELD
        )
    yield from replaced & values.keys() - command_line.keys()


UNSPLIT_VALUES = {"sequence_parallel": False, "context_parallel_size": 1}
"""Fields that split sequences over ranks -> the value that disables the split."""


def drop_contradicting_defaults(defaults: dict[str, Any], explicit: Mapping[str, Any], notes: list[str]) -> None:
    """Remove the defaults that contradict related fields of the command line, --config or the JSON.

    Args:
        defaults: field -> value of the sources of defaults; changed in place.
        explicit: field -> value of flags and JSON.
        notes: receives a line for each removed default that the user may expect to apply.
    """
    if "vocab_file" in explicit or "merge_file" in explicit:
        defaults.pop("tokenizer_path", None)
    if "sft" in explicit:
        for name in PATHS:
            defaults.pop(name, None)
    elif any(name in explicit for name in PATHS):
        defaults.pop("sft", None)
        defaults.pop("valid_sft", None)
    for name in shadowing_lengths(explicit):
        defaults.pop(name, None)
    if any(name in explicit for name in SPLIT_PATH_FIELDS):
        defaults.pop("data_path", None)
        defaults.pop("split", None)
    elif "data_path" in explicit:
        for name in SPLIT_PATH_FIELDS:
            defaults.pop(name, None)
    if "lr" in explicit and defaults.get("min_lr", 0.0) > explicit["lr"]:
        notes.append(
            f"the default --min-lr {defaults.pop('min_lr'):g} is above --lr {explicit['lr']:g}, so --min-lr is 0"
        )
    splitting = [
        name for name, unsplit in UNSPLIT_VALUES.items() if explicit.get(name, defaults.get(name, unsplit)) != unsplit
    ]
    if "sample_prompts" in defaults and splitting:
        del defaults["sample_prompts"]
        flag = f"--{splitting[0].replace('_', '-')}"
        notes.append(
            f"--sample-prompts of the defaults has no effect with {flag}; use tools/generate.py on the checkpoint"
        )
    merged = {**defaults, **explicit}
    if defaults.get("optimizer") == "adafactor" and (
        "optimizer" in explicit or merged.get("model_parallel_size", 1) > 1 or merged.get("zero_stage", 0)
    ):
        for name in ("optimizer", "lr"):  # a learning rate for Adafactor is far above one for AdamW
            defaults.pop(name, None)
        notes.append(
            "the default --optimizer adafactor and its --lr are incompatible with the given flags and are dropped"
        )
    if "dec_seq_length" in explicit:  # the default values may produce longer targets
        for name in ("noise_density", "mean_span_length"):
            defaults.pop(name, None)
