"""The only module that reads and writes DeepSpeed's JSON. Parsing is strict and reports line numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import Any

from megatron.arguments import deepspeed_keys, deepspeed_scheduler
from megatron.arguments.flag_values import all_options, has_suggestion, unknown_message
from megatron.arguments.sources import DEEPSPEED_JSON, Layer
from megatron.config.config import Config
from megatron.config.curriculum import curriculum_text
from megatron.config.option import LARGEST_INT
from megatron.errors import ConfigError
from tds.schedule.simulate import is_auto

# Strict JSON with positions: duplicate keys, comments and trailing commas are errors with file, line and column.

_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]')


@dataclass(frozen=True)
class JsonText:
    """A parsed JSON object with the position of each key."""

    path: str
    values: dict[str, Any]
    positions: dict[tuple[str, ...], tuple[int, int]]  # keys from the root -> line, column

    def location(self, *keys: str) -> str:
        """Format a key's location as "file:line:column"; ``keys`` is its path, such as ("fp16", "enabled")."""
        line, column = self.positions.get(keys, (1, 1))
        return f"{self.path}:{line}:{column}"


def read_json(path: str, flag: str = "--deepspeed_config") -> JsonText:
    """Read the JSON object in ``path``; a leading byte order mark is accepted.

    Args:
        flag: the flag that names the file, for messages.

    Raises:
        ConfigError: the file is missing, unreadable, empty, not UTF-8 or not JSON, has a duplicate key, or does not
            contain an object.
    """
    text = read_text(path, flag)
    try:
        values = json.loads(text, parse_constant=_parse_constant)
    except json.JSONDecodeError as error:
        hint = _hint(text, error.pos)
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: must be JSON, got {error.msg}{hint}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: is nested too deeply") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1:1: must contain one JSON object {{...}}, got {type(values).__name__}")
    return JsonText(path, values, _key_positions(path, text))


def read_text(path: str, flag: str, content: str = "one JSON object {...}") -> str:
    """Read the text file ``path``.

    Args:
        flag: the flag that names the file, for messages.
        content: description of the expected content, for messages.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or is empty.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{flag} must name a file that can be read, got {path}: {error.strerror} "
            f"(looked in {Path.cwd()}). Correct the path"
        ) from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line}:1: must be UTF-8, got byte {raw[error.start]:#x}. Save it as UTF-8"
        ) from error
    if not text.strip():
        fix = "Write {} for no settings" if path.endswith("json") else "Remove the flag for no settings"
        raise ConfigError(f"{path}:1:1: must contain {content}, got an empty file. {fix}")
    return text


def _parse_constant(name: str) -> float:
    """Convert the constant Infinity, which Accelerate writes for steps_per_print, to a float.

    Raises:
        ValueError: the constant is not Infinity.
    """
    if name == "Infinity":
        return inf
    raise ValueError(f"numbers must be finite, got {name}")


def _hint(text: str, position: int) -> str:
    before, after = text[:position].rstrip(), text[position:].lstrip()
    if after.startswith(("//", "/*", "#")):
        return "; a comment is not JSON: remove it"
    if before.endswith(",") and after[:1] in ("}", "]"):
        return "; remove the trailing comma"
    return ""


def _key_positions(path: str, text: str) -> dict[tuple[str, ...], tuple[int, int]]:
    """Locate all keys in valid JSON text by line and column."""
    positions: dict[tuple[str, ...], tuple[int, int]] = {}
    stack: list[str] = []  # enclosing keys; "" for the root and for array elements
    previous = ("", 0)
    for match in _WORD.finditer(text):
        token = match.group()
        if token == ":":
            keys = (*stack[1:], json.loads(previous[0]))
            position = _line_and_column(text, previous[1])
            if keys in positions and "" not in keys:
                raise ConfigError(
                    f"{path}:{position[0]}:{position[1]}: a key may occur only once, got {keys[-1]!r} again (first on "
                    f"line {positions[keys][0]}). Remove one"
                )
            positions[keys] = position
            pending = keys[-1]
        elif token in "{[":
            stack.append(pending if stack and previous[0] == ":" else "")
        elif token in "}]":
            stack.pop()
        previous = (token, match.start())
    return positions


def _line_and_column(text: str, position: int) -> tuple[int, int]:
    return text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)


# Keys and their values.
#
# "auto" stands for the value of the flag. ``sources`` resolves differences between a flag and the JSON. This project
# implements precision, loss scaling, gradient norm and clipping itself, so their keys are not passed to the engine.


def read(path: str) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """Read the JSON file ``path``, and return the result of ``validate_keys``.

    If the file cannot be parsed, the result is an empty object with the error as its only problem.
    """
    try:
        return validate_keys(read_json(path))
    except ConfigError as error:
        return {}, [str(error)], {}


def validate_keys(text: JsonText) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """Validate the keys of a JSON object.

    Returns:
        Tuple (object without invalid keys, problems, ignored key (with dots) -> reason).
    """
    valid: dict[str, Any] = {}
    problems: list[str] = []
    ignored: dict[str, str] = {}
    for name, value in _without_comments(text.values, ignored).items():
        value = _with_integers(name, value)
        if not _is_known(name) and not has_suggestion(name, deepspeed_keys.KNOWN):
            ignored[name] = UNKNOWN
            continue
        key_problems = list(_key_problems(text, name, value))
        problems += key_problems
        if not key_problems:
            valid[deepspeed_keys.RENAMED.get(name, name)] = value
    return valid, problems, ignored | dict(_ignored_keys(valid))


CURRICULUM = "curriculum_learning"
UNKNOWN = "unknown key"
"""Reason to ignore a top-level key that is neither a key of DeepSpeed nor similar to one."""


def _is_known(name: str) -> bool:
    return name in deepspeed_keys.KNOWN or name in deepspeed_keys.RENAMED


def _without_comments(section: Mapping[str, Any], ignored: dict[str, str], path: str = "") -> dict[str, Any]:
    """Return the section without keys that start with "_", "#" or "//", which are added to ``ignored``."""
    remaining: dict[str, Any] = {}
    for name, value in section.items():
        if name.startswith(("_", "#", "//")):
            ignored[f"{path}{name}"] = "a comment"
        else:
            is_section = isinstance(value, dict)
            remaining[name] = _without_comments(value, ignored, f"{path}{name}.") if is_section else value
    return remaining


def _with_integers(path: str, value: Any) -> Any:
    """Convert whole floats such as 1e5 to integers where DeepSpeed requires integers.

    An infinite steps_per_print, as Accelerate writes it, becomes the largest integer.
    """
    if isinstance(value, dict):
        return {name: _with_integers(f"{path}.{name}", inner) for name, inner in value.items()}
    if path == "steps_per_print" and value in (inf, "inf"):
        return LARGEST_INT
    parent, _, name = path.rpartition(".")
    section = _section(deepspeed_keys.RENAMED.get(parent, parent)) if parent else _TOP_LEVEL_KEYS
    key = (section or {}).get(name)
    is_integral = isinstance(value, float) and abs(value) <= LARGEST_INT and value.is_integer()
    return int(value) if is_integral and key is not None and key.value_type in deepspeed_keys.INTEGERS else value


_TOP_LEVEL_KEYS = {**deepspeed_keys.FIELD_KEYS, **deepspeed_keys.PASSED_TO_ENGINE}


def _ignored_keys(json: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (ignored key with dots, reason)."""
    known = {**deepspeed_keys.IGNORED, **deepspeed_keys.PASSED_TO_ENGINE} if not path else _section(path) or {}
    for name, value in json.items():
        key, full_name = known.get(name), f"{path}.{name}" if path else name
        if key is not None and key.is_ignored:
            yield full_name, key.description
        elif name == "scheduler" and deepspeed_scheduler.is_supported(value):
            continue
        elif not path and (name in deepspeed_keys.REJECTED or (name == CURRICULUM and _is_disabled(name, value))):
            yield full_name, "it is disabled"
        elif isinstance(value, dict) and _section(full_name):
            yield from _ignored_keys(value, full_name)


def _section(path: str) -> Mapping[str, deepspeed_keys.Key] | None:
    return deepspeed_keys.SECTIONS.get(path) or deepspeed_keys.SUBSECTIONS.get(path)


def _is_disabled(name: str, value: Any) -> bool:
    """Return True if a section that is not supported has no effect: it is disabled, or all values are "auto"."""
    if not isinstance(value, dict):
        return value is False
    if name == "scheduler":
        return all(entry == "auto" for entry in value.get("params", {}).values()) and bool(value.get("params"))
    if name == "data_types":
        return value.get("grad_accum_dtype", "fp32") in ("fp32", None) and set(value) == {"grad_accum_dtype"}
    if name == CURRICULUM:
        return value.get("enabled", False) is False
    if name == "data_efficiency":
        return value.get("enabled") is False or all(
            entry.get("enabled", False) is False for entry in value.values() if isinstance(entry, dict)
        )
    return value.get("enabled") is False


def _key_problems(text: JsonText, name: str, value: Any) -> Iterator[str]:
    location = text.location(name)
    renamed = deepspeed_keys.RENAMED.get(name, name)
    if name == "scheduler" and deepspeed_scheduler.is_supported(value):
        yield from (f"{location}: {problem}" for problem in deepspeed_scheduler.problems(value))
    elif name in deepspeed_keys.REJECTED:
        if not _is_disabled(name, value):
            yield f"{location}: key {name} is not supported: {deepspeed_keys.REJECTED[name]}"
    elif name == CURRICULUM and _is_disabled(name, value):
        return
    elif name in deepspeed_keys.IGNORED:
        yield from _value_problems(location, name, deepspeed_keys.IGNORED[name], value)
    elif name == "optimizer" and isinstance(value, dict) and list(_optimizer_problems(text, value)):
        yield from _optimizer_problems(text, value)  # valid params depend on the type
    elif renamed in deepspeed_keys.SECTIONS:
        yield from _section_problems(text, (name,), deepspeed_keys.SECTIONS[renamed], value)
        if name == "zero_optimization" and isinstance(value, dict):
            yield from _zero_problems(text, value)
    elif name in deepspeed_keys.SUBSECTIONS:
        yield from _section_problems(text, (name,), deepspeed_keys.SUBSECTIONS[name], value)
    elif name in deepspeed_keys.FIELD_KEYS or name in deepspeed_keys.PASSED_TO_ENGINE:
        yield from _value_problems(
            location, name, deepspeed_keys.FIELD_KEYS.get(name) or deepspeed_keys.PASSED_TO_ENGINE[name], value
        )
    else:
        problem = unknown_message("key", name, deepspeed_keys.KNOWN).replace("--help-all lists all flags", "remove it")
        yield f"{location}: {problem}"


def _section_problems(
    text: JsonText, path: tuple[str, ...], known: Mapping[str, deepspeed_keys.Key], section: Any
) -> Iterator[str]:
    name = ".".join(path)
    if not isinstance(section, dict):
        yield f"{text.location(*path)}: {name} must be an object {{...}}, got {section!r}"
        return
    for inner, value in section.items():
        location = text.location(*path, inner)
        full_name = f"{name}.{inner}"
        if full_name in deepspeed_keys.SUBSECTIONS:
            yield from _section_problems(text, (*path, inner), deepspeed_keys.SUBSECTIONS[full_name], value)
        elif inner in known:
            yield from _value_problems(location, full_name, known[inner], value)
        else:
            rule = deepspeed_keys.SUPPORTED_KEYS_HINTS.get(name) or f"supported keys are {', '.join(known)}"
            yield f"{location}: {unknown_message('key', inner, known).partition('; --help-all')[0]} in {name}: {rule}"


def _value_problems(location: str, name: str, key: deepspeed_keys.Key, value: Any) -> Iterator[str]:
    if value == "auto" and not name.startswith("pipeline.") and key.value_type != deepspeed_keys.OBJECT:
        return
    if (
        key.is_ignored
        and key.accepted_values
        and not any(value is allowed or value == allowed for allowed in key.accepted_values)
    ):
        yield f"{location}: {name} {format_value(value)} is not supported: {key.alternative}"
    is_number = _is_number(value)
    is_integer = isinstance(value, int) and is_number and abs(value) <= LARGEST_INT
    if key.choices:
        if value not in key.choices:
            yield f"{location}: {name} must be one of {', '.join(key.choices)}, got {value!r}"
        return
    is_valid = {
        deepspeed_keys.ANY: True,
        deepspeed_keys.POSITIVE: is_integer and value >= 1,
        deepspeed_keys.INTEGER: is_integer and value >= 0,
        deepspeed_keys.NUMBER: is_number and value >= 0,
        deepspeed_keys.BOOLEAN: isinstance(value, bool),
        deepspeed_keys.TEXT: isinstance(value, str),
        deepspeed_keys.OBJECT: isinstance(value, dict),
        deepspeed_keys.TEXT_OR_NULL: value is None or isinstance(value, str),
        deepspeed_keys.TEXTS: isinstance(value, list) and all(isinstance(v, str) for v in value),
        deepspeed_keys.DEPTH: is_integer and value >= -1,
        deepspeed_keys.POSITIVES: isinstance(value, list) and all(_is_positive(v) for v in value),
        deepspeed_keys.BETAS: isinstance(value, list) and len(value) == 2 and all(_is_number(v) for v in value),
    }
    if not is_valid[key.value_type]:
        yield f"{location}: {name} must be {key.value_type}, got {value!r}"


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < inf


def _optimizer_problems(text: JsonText, section: dict[str, Any]) -> Iterator[str]:
    optimizer, params = section.get("type", "AdamW"), section.get("params", {})
    if isinstance(params, dict) and "max_grad_norm" in params:
        location = text.location("optimizer", "params", "max_grad_norm")
        yield f"{location}: optimizer.params.max_grad_norm is not supported, as in DeepSpeed. Use gradient_clipping"
    if isinstance(optimizer, str) and optimizer.lower() in deepspeed_keys.OPTIMIZER_TYPES and isinstance(params, dict):
        rejected = deepspeed_keys.UNSUPPORTED_PARAMS[deepspeed_keys.OPTIMIZER_TYPES[optimizer.lower()]]
        for name in params:
            if name in rejected:
                location = text.location("optimizer", "params", name)
                yield (
                    f"{location}: optimizer.params.{name} is not a parameter of {optimizer} in DeepSpeed. Remove the "
                    "key"
                )
    if isinstance(optimizer, str) and optimizer.lower() not in deepspeed_keys.OPTIMIZER_TYPES:
        yield (
            f"{text.location('optimizer', 'type')}: optimizer.type must be AdamW, Adam (which DeepSpeed runs as "
            f"AdamW), SGD or Muon, got {optimizer!r}. Use one of these, or remove the section"
        )


def _zero_problems(text: JsonText, section: dict[str, Any]) -> Iterator[str]:
    pins = {
        name: section[name].get("pin_memory")
        for name in deepspeed_keys.OFFLOAD_FIELDS
        if isinstance(section.get(name), dict)
    }
    if len(set(pins.values()) - {None, "auto"}) > 1:
        location = text.location("zero_optimization", "offload_param")
        yield (
            f"{location}: pin_memory must be the same in {' and '.join(deepspeed_keys.OFFLOAD_FIELDS)}, got {pins}. "
            "Change one of them"
        )


def _zero_values(json: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yield (field, (key, value)) for the values in "zero_optimization"."""
    section = json.get("zero_optimization", {})
    if _is_stated(section.get("stage")):
        yield "zero_stage", ("zero_optimization.stage", section["stage"])
    for name in ("cpu_offload", "cpu_offload_params"):
        if _is_stated(section.get(name)):
            yield deepspeed_keys.ZERO[name].field, (f"zero_optimization.{name}", section[name])
    for name in ("reduce_bucket_size", "allgather_bucket_size"):
        if _is_stated(section.get(name)) and section[name]:
            yield name, (f"zero_optimization.{name}", min(int(section[name]), LARGEST_INT))
    for name in ("stage3_prefetch_bucket_size", "prefetch_bucket_size"):
        if _is_stated(section.get(name)):
            num_elements = min(ceil(section[name]), LARGEST_INT)
            yield "stage3_prefetch_bucket_size", (f"zero_optimization.{name}", num_elements)
    for name, field in deepspeed_keys.OFFLOAD_FIELDS.items():
        inner = section.get(name) or {}
        if _is_stated(inner.get("device")):
            device = inner["device"]
            yield field, (f"zero_optimization.{name}.device {device}, that is", device == "cpu")
        if _is_stated(inner.get("pin_memory")) and inner.get("device") == "cpu":
            yield "no_pin_memory", (f"zero_optimization.{name}.pin_memory, that is", not inner["pin_memory"])


def json_layer(
    json: Mapping[str, Any], flags: Mapping[str, Any], defaults: Mapping[str, Any], problems: list[str]
) -> Layer:
    """Build the layer of JSON values.

    ``flags`` and ``defaults`` determine two values that the JSON depends on: the stage count, because "pipeline" has
    no effect without a pipeline, and the learning rate, because the scheduler's minimum is a fraction of it.

    Args:
        flags: field -> value of the command line and --config.
        defaults: field -> value of the sources of defaults.
        problems: receives contradictions within the JSON.
    """
    options = {option.name: option for _, option in all_options()}
    has_pipeline = flags.get("pipe_parallel_size", defaults.get("pipe_parallel_size", 0)) > 1
    keyed_values = _json_values(json, problems) | (_pipeline_values(json) if has_pipeline else {})
    lr = flags.get("lr", keyed_values["lr"][1] if "lr" in keyed_values else defaults.get("lr", options["lr"].default))
    keyed_values |= deepspeed_scheduler.scheduler_values(json, lr)
    invalid = {name: options[name].problem(value, f"{key} in the JSON") for name, (key, value) in keyed_values.items()}
    return Layer(
        DEEPSPEED_JSON,
        values={name: value for name, (_, value) in keyed_values.items()},
        written={
            name: f"{key} {format_value(value)}{_origin_note(key, json)}" for name, (key, value) in keyed_values.items()
        },
        keys={name: key for name, (key, _) in keyed_values.items()},
        invalid={name: problem for name, problem in invalid.items() if problem},
        excluded={"dtype": disabled_dtypes(json)},
    )


def _origin_note(key: str, json: Mapping[str, Any]) -> str:
    """Describe the default of a scheduler parameter that the JSON omits; "" for every other key."""
    section, _, name = key.rpartition(".params.")
    is_omitted = section == "scheduler" and name not in json["scheduler"]["params"]
    return f" (default of {json['scheduler']['type']})" if is_omitted else ""


def disabled_dtypes(json: Mapping[str, Any]) -> tuple[str, ...]:
    """List the number formats that the JSON disables with ``"enabled": false``."""
    return tuple(name for name in ("fp16", "bf16") if json.get(name, {}).get("enabled") is False)


def _json_values(json: Mapping[str, Any], problems: list[str]) -> dict[str, tuple[str, Any]]:
    """Map each field that the JSON sets to (key, value)."""
    keyed_values = {
        key.field: (name, json[name]) for name, key in deepspeed_keys.FIELD_KEYS.items() if _is_stated(json.get(name))
    }
    fp16, bf16 = json.get("fp16", {}), json.get("bf16", {})
    if fp16.get("enabled") is True and bf16.get("enabled") is True:
        problems.append("fp16 and bf16 exclude each other, got both enabled in the JSON. Disable one")
    elif fp16.get("enabled") is True:
        keyed_values["dtype"] = ("fp16.enabled true, that is", "fp16")
    elif bf16.get("enabled") is True:
        keyed_values["dtype"] = ("bf16.enabled true, that is", "bf16")
    if fp16.get("enabled") is not False:
        keyed_values |= {
            k.field: (f"fp16.{n}", fp16[n])
            for n, k in deepspeed_keys.FP16.items()
            if k.field and _is_stated(fp16.get(n))
        }
    keyed_values |= dict(_zero_values(json))
    activations = json.get("activation_checkpointing", {})
    keyed_values |= {
        k.field: (f"activation_checkpointing.{n}", activations[n])
        for n, k in deepspeed_keys.ACTIVATIONS.items()
        if k.field and _is_stated(activations.get(n))
    }
    section = json.get("optimizer", {})
    params = section.get("params", {})
    if _is_stated(section.get("type")):
        keyed_values["optimizer"] = ("optimizer.type", deepspeed_keys.OPTIMIZER_TYPES[section["type"].lower()])
    for name, key in deepspeed_keys.OPTIMIZER_PARAMS.items():
        if key.field and _is_stated(params.get(name)):
            keyed_values[_field_of(section, name)] = (f"optimizer.params.{name}", params[name])
    if _is_stated(params.get("betas")):
        keyed_values["adam_beta1"] = ("optimizer.params.betas[0]", params["betas"][0])
        keyed_values["adam_beta2"] = ("optimizer.params.betas[1]", params["betas"][1])
    if (curriculum := json.get(CURRICULUM)) is not None and not _is_disabled(CURRICULUM, curriculum):
        keyed_values["seq_length_curriculum"] = (f"{CURRICULUM}, that is", curriculum_text(curriculum))
    return keyed_values


def implied_values(json: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """Return field -> DeepSpeed's default for parameters that the JSON's optimizer section omits.

    The result is empty if the section has no type, because DeepSpeed then builds no optimizer from it. A parameter with
    the value "auto" takes the value of its flag.

    Args:
        known: fields that flags or defaults of the program set.
    """
    section = json.get("optimizer", {})
    if not _is_stated(section.get("type")):
        return {}
    params, implied = (
        section.get("params", {}),
        deepspeed_keys.default_params(section["type"], section.get("params", {})),
    )
    omitted: dict[str, Any] = {_field_of(section, name): value for name, value in implied.items() if name not in params}
    if deepspeed_keys.OPTIMIZER_TYPES[section["type"].lower()] == "muon":
        omitted["muon_scale_mode"] = "original"  # sqrt(max(1, rows / columns)), the only mode of DeepSpeed
    our_defaults = {option.name: option.default for _, option in all_options()}
    return {name: value for name, value in omitted.items() if name not in known and value != our_defaults[name]}


def _field_of(section: Mapping[str, Any], param: str) -> str:
    """Map an optimizer parameter to its field."""
    is_muon = str(section.get("type")).lower() == "muon"
    return "muon_momentum" if is_muon and param == "momentum" else deepspeed_keys.OPTIMIZER_PARAMS[param].field


def _pipeline_values(json: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Map each field that "pipeline" sets to (key, value); "auto" is a valid schedule."""
    section = json.get("pipeline", {})
    names = [
        name
        for name in deepspeed_keys.PIPELINE
        if name in section and (name == "schedule" or _is_stated(section[name]))
    ]
    return {deepspeed_keys.PIPELINE[name].field: (f"pipeline.{name}", section[name]) for name in names}


def _is_stated(value: Any) -> bool:
    return value is not None and value != "auto"


def format_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def engine_dict(config: Config, world_size: int) -> dict[str, Any]:
    """Build the configuration for DeepSpeed's engine: sizes and DeepSpeed's own switches, no precision or clipping."""
    d = config.parallel.data_parallel_size(world_size)
    context = config.parallel.context_parallel_size  # DeepSpeed counts context-parallel ranks as replicas
    engine = _without_auto(
        {name: value for name, value in config.deepspeed.items() if name in deepspeed_keys.PASSED_TO_ENGINE}
    )
    engine.setdefault("steps_per_print", config.run.log_interval or LARGEST_INT)
    engine.setdefault("wall_clock_breakdown", False)
    disabled = {"enabled": False}  # throughput timers synchronize with the device at each micro-batch
    engine["timers"] = {"throughput": disabled, **engine.get("timers", {})}
    engine.setdefault("zero_allow_untested_optimizer", True)
    engine.update(
        train_batch_size=config.batch.batch_size * config.batch.gas * d * context,
        train_micro_batch_size_per_gpu=config.batch.batch_size,
        gradient_accumulation_steps=config.batch.gas,
        gradient_clipping=0.0,
        zero_optimization={"stage": 0} | _bucket_size(config),
    )
    if config.parallel.has_pipeline:
        engine["pipeline"] = engine.get("pipeline", {}) | _pipeline_section(config)
    return engine


def _bucket_size(config: Config) -> dict[str, int]:
    size = config.parallel.reduce_bucket_size
    return {"reduce_bucket_size": size} if size else {}


def _pipeline_section(config: Config) -> dict[str, Any]:
    """Collect pipeline settings that differ from the engine's defaults.

    Unset values are omitted. The engine then reads the chunk count from its module, which also determines the
    schedule, and the timeout from its process group.
    """
    settings = {name: getattr(config.parallel, key.field) for name, key in deepspeed_keys.PIPELINE.items()}
    settings["micro_batch_group_size"] = config.parallel.group_size
    if is_auto(config.parallel.pipeline_schedule):
        settings["schedule"] = config.parallel.schedule
    if settings["chunks"] == 1 and "pipeline_chunks" not in config.explicit_fields:
        del settings["chunks"]
    return {name: value for name, value in settings.items() if bool(value) != (name in deepspeed_keys.ON_BY_DEFAULT)}


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    """Drop keys with the value "auto", so that DeepSpeed uses its own defaults for them."""
    return {
        name: _without_auto(value) if isinstance(value, dict) else value
        for name, value in section.items()
        if value != "auto"
    }
