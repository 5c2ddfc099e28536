"""The sources of a configuration in order of precedence, and the merge of their values.

``SOURCES`` is the order; --help-all and docs/flags.md print it. ``collect`` reads a ``Layer`` of each source, and
``merge`` decides the value of each field and records its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.arguments.related_fields import drop_contradicting_defaults
from megatron.arguments.scan import Scan
from megatron.arguments.translate import SCALING


@dataclass(frozen=True, kw_only=True)
class Source:
    """A row of the table of sources.

    Args:
        name: short name.
        description: where the values come from.
        overrides: the sources whose values it replaces.
        conflict: the outcome if a stronger source gives another value.
        is_default: the source provides defaults. Its value is dropped if it contradicts a related field of the
            command line, --config or the JSON.
    """

    name: str
    description: str
    overrides: str = "all sources below"
    conflict: str = "the stronger source decides"
    is_default: bool = False


CHECKPOINT_SCHEDULE = Source(
    name="checkpoint's schedule",
    description=(
        "only with --use-checkpoint-opt_param-scheduler: learning rate, its schedule and weight decay of the run that "
        "--load or --resume resumes"
    ),
    conflict="",
)
COMMAND_LINE = Source(
    name="command line",
    description="flags as typed; if a flag is repeated, the last one",
    overrides="all sources below, except for the loss scale of the JSON",
    conflict="the flag is ignored, and listed at the start",
)
CONFIG_FILE = Source(
    name="--config",
    description="a file of flags (YAML, TOML, JSON), a GPT-NeoX YAML, or the config.json of a run",
    overrides="all sources below; the config.json of a run also removes MEGATRON_DEFAULTS and the program's defaults",
    conflict="the command line decides, also if it sets a related flag, such as samples for a length in steps",
)
DEEPSPEED_JSON = Source(
    name="DeepSpeed JSON",
    description=(
        '--deepspeed_config, or its keys in the file of --config; "auto" sets no value; the learning rate of the '
        "scheduler section (of a WarmupDecayLR without warmup_max_lr: 1e-3) replaces that of the optimizer section"
    ),
    conflict=(
        "an error if a flag of the command line differs (the learning rate of the scheduler section included); "
        "exceptions: flags decide the optimizer and its parameters, the JSON decides the loss scale, and --config "
        "overrides the JSON with a note"
    ),
)
CHECKPOINT = Source(
    name="checkpoint",
    description=(
        "sizes, architecture, vocabulary and data that --load or --resume reads from a checkpoint or a folder; for a "
        "resumed run also parameters that would otherwise have DeepSpeed's default, and settings whose default changed"
    ),
    conflict=(
        "an error (exit code 3) if the command line or --config requires other weights; the stronger source decides "
        "fields that fit the same weights"
    ),
    is_default=True,
)
MODEL = Source(
    name="--model",
    description="architecture, without sizes, of the model that --model names",
    overrides=(
        "all sources below, and on the command line the architecture of the file of --config; in MEGATRON_DEFAULTS it "
        "overrides the program's defaults only"
    ),
    is_default=True,
)
RUN_SCRIPT = Source(
    name="MEGATRON_DEFAULTS",
    description="flags in the environment: the recipe of a run script, whose variables are flags of the command line",
    is_default=True,
)
PROGRAM = Source(
    name="program",
    description=(
        "pretrain(args_defaults=...): Megatron's defaults in pretrain_gpt.py and pretrain_bert.py, --activation relu "
        "and --layernorm-epsilon 1e-6 in pretrain_t5.py; a script for Megatron's T5, known by its flags, has the "
        "defaults of that program"
    ),
    is_default=True,
)
DEEPSPEED_DEFAULT = Source(
    name="DeepSpeed's default",
    description="parameters that the optimizer section of the JSON omits",
    is_default=True,
)
FAMILY = Source(
    name="family",
    description="LLaMA: --activation gated-silu, an untied head, no dropout; MPT: no dropout",
    is_default=True,
)
DEFAULT = Source(name="default", description="the default in the table of flags", overrides="", is_default=True)

SOURCES = (
    CHECKPOINT_SCHEDULE, COMMAND_LINE, CONFIG_FILE, DEEPSPEED_JSON,
    CHECKPOINT, MODEL, RUN_SCRIPT, PROGRAM, DEEPSPEED_DEFAULT, FAMILY, DEFAULT,
)  # fmt: skip
"""All sources, the strongest first. ``config_from_values`` applies the last two to fields without any other source."""


class Setting(NamedTuple):
    """A field's value and origin.

    Args:
        source: the source that decided the value.
        written: the flag or key with the value, as in the source; "" if no message needs it.
        key: the key of a JSON, with dots.
    """

    value: Any
    source: Source
    written: str = ""
    key: str = ""


@dataclass(frozen=True)
class Layer:
    """Values from one source.

    Args:
        values: field -> value.
        written: field -> flag or key with its value, for messages.
        keys: field -> key of the JSON.
        invalid: field -> problem of its value, which is not used.
        excluded: field -> values that the source forbids without giving another.
    """

    source: Source
    values: dict[str, Any]
    written: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    invalid: Mapping[str, str] = field(default_factory=dict)
    excluded: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def setting(self, name: str) -> Setting:
        """Look up the field ``name`` together with its source."""
        return Setting(self.values[name], self.source, self.written.get(name, ""), self.keys.get(name, ""))


def merge(layers: Sequence[Layer], scanned: Scan) -> dict[str, Setting]:
    """Merge the layers into field -> setting.

    The first layer that has a field decides its value, unless ``CONFLICTS`` has a rule for the two sources. Defaults
    that contradict a related field of the command line, --config or the JSON are dropped.

    Args:
        layers: layers in order of precedence, the strongest first.
        scanned: receives problems, notes and ignored flags.
    """
    explicit = _strongest_settings((layer for layer in layers if not layer.source.is_default), scanned)
    defaults = _strongest_settings((layer for layer in layers if layer.source.is_default), scanned)
    for layer in layers:
        for name, values in layer.excluded.items():
            if name in explicit and explicit[name].value in values:
                scanned.problems.append(_excluded_problem(explicit[name]))
            if name in defaults and defaults[name].value in values:
                del defaults[name]
    usable = {name: setting.value for name, setting in defaults.items()}
    if usable:
        drop_contradicting_defaults(usable, {name: setting.value for name, setting in explicit.items()}, scanned.notes)
    return {**{name: setting for name, setting in defaults.items() if name in usable}, **explicit}


def _strongest_settings(layers: Iterable[Layer], scanned: Scan) -> dict[str, Setting]:
    """Select each setting from the first layer that has the field; ``CONFLICTS`` resolves differing values."""
    merged: dict[str, Setting] = {}
    for layer in layers:
        for name, value in layer.values.items():
            stronger = merged.get(name)
            if name in layer.invalid:
                scanned.problems.append(layer.invalid[name])
            elif stronger is None:
                merged[name] = layer.setting(name)
            elif stronger.value != value and (decide := CONFLICTS.get((stronger.source, layer.source))):
                merged[name] = decide(name, stronger, layer.setting(name), scanned)
    return merged


def merged_values(layers: Sequence[Layer]) -> dict[str, Any]:
    """Merge layers of defaults, the strongest first, into field -> value, before the other layers are known."""
    return {name: value for layer in reversed(layers) for name, value in layer.values.items()}


# Rules for two sources with different values. Each returns the setting to use.

REPLACED_BY_SCHEDULE = "the schedule of the checkpoint replaces it"
"""Reason why a flag or key has no effect with --use-checkpoint-opt_param-scheduler."""


def _flag_and_json(name: str, flag: Setting, json: Setting, scanned: Scan) -> Setting:
    if name in SCALING:
        scanned.ignored[flag.written] = f"{json.key} of the JSON sets the loss scale of DeepSpeed's engine"
        return json
    if json.key.startswith("optimizer."):
        scanned.ignored[json.key] = "the flags set the optimizer and its parameters"
        return flag
    fix = "remove the key" if json.key.startswith("pipeline.") else 'write "auto" in the JSON'
    scanned.problems.append(
        f"the command line and the JSON must agree, got {flag.written} and {json.written}. Change one of them, or {fix}"
    )
    return flag


def _checkpoint_and_json(name: str, saved: Setting, json: Setting, scanned: Scan) -> Setting:
    scanned.ignored[json.key] = REPLACED_BY_SCHEDULE
    return saved


def _file_and_json(name: str, file: Setting, json: Setting, scanned: Scan) -> Setting:
    scanned.notes.append(f"{file.written} overrides {json.written} of the JSON")
    return file


CONFLICTS: Mapping[tuple[Source, Source], Callable[[str, Setting, Setting, Scan], Setting]] = {
    (CHECKPOINT_SCHEDULE, DEEPSPEED_JSON): _checkpoint_and_json,
    (COMMAND_LINE, DEEPSPEED_JSON): _flag_and_json,
    (CONFIG_FILE, DEEPSPEED_JSON): _file_and_json,
}
"""(stronger source, weaker source) -> rule for a field with two values. For other pairs the stronger source decides.

``checkpoint.checkpoint_args`` compares the sizes of a checkpoint with the flags before the layers are merged.
"""


def _excluded_problem(setting: Setting) -> str:
    return (
        f"the command line and the JSON must agree, got {setting.written} and {setting.value}.enabled false. "
        'Change one of them, or write "auto" in the JSON'
    )
