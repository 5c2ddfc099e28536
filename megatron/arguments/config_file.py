"""--config: flags from a YAML, TOML or JSON file, or from the config.json of a run. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.arguments import deepspeed_keys, related_fields
from megatron.arguments.deepspeed_json import JsonText, read_json, read_text, validate_keys
from megatron.arguments.flag_values import (
    all_options,
    all_sections,
    config_from_values,
    family_options,
    rejected_flags,
    scan,
    unknown_message,
)
from megatron.arguments.foreign_flags import foreign_flags
from megatron.arguments.scan import Scan
from megatron.arguments.sources import COMMAND_LINE, CONFIG_FILE, Layer, merge
from megatron.config.changed_defaults import describe_saved_settings, former_defaults
from megatron.config.config import FIELDS_WITHOUT_FLAG, RENAMED_SECTIONS
from megatron.config.option import Option, is_derived
from megatron.errors import ConfigError
from megatron.models.registry import FAMILIES

# Parse text into keys and values. Parsing is strict: a duplicated key is an error, reported with file, line and key.
#
# | suffix | parser |
# |---|---|
# | .yaml, .yml | PyYAML, whose nodes have line numbers; scalars follow YAML 1.2, so that 1e-4 is a number |
# | .toml | tomllib |
# | .json | ``deepspeed_json.read_json`` |


@dataclass(frozen=True)
class FileText:
    """Contents of a file with the position of each key.

    Args:
        lines: keys from the root -> line number.
    """

    path: str
    values: dict[str, Any]
    lines: Mapping[tuple[str, ...], int]

    def location(self, *keys: str) -> str:
        """Format a key's location as "file:line".

        ``keys`` is the path from the root, such as ("model", "num_layers").
        """
        line = self.lines.get(keys)
        return f"{self.path}:{line}" if line else self.path


def read_file(path: str) -> FileText:
    """Parse ``path``, a .yaml, .yml, .toml or .json file.

    Raises:
        ConfigError: the suffix is not supported, or the file is missing, not UTF-8, empty, malformed, or has a
            duplicate key.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in READERS:
        raise ConfigError(f"--config must name a file that ends in {', '.join(READERS)}, got {path}. Rename it")
    return READERS[suffix](path)


def _read_json(path: str) -> FileText:
    text = read_json(path, "--config")
    return FileText(path, text.values, {keys: line for keys, (line, _) in text.positions.items()})


_TOML_TABLE = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?")
_TOML_KEY = re.compile(r"\s*([\w-]+)\s*=")


def _read_toml(path: str) -> FileText:
    import tomllib  # deferred to the first TOML file: takes 5 ms

    text = read_text(path, "--config", "flags")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"line (\d+)", str(error))
        line = text.splitlines()[int(match[1]) - 1].strip() if match else ""
        location = f"{path}:{match[1]}" if match else path
        if "overwrite" in str(error) or "twice" in str(error):
            raise ConfigError(f"{location}: a key may occur only once, got {line!r} again. Remove one") from error
        raise ConfigError(f"{location}: must be TOML, got {error}") from error
    lines: dict[tuple[str, ...], int] = {}
    heading: tuple[str, ...] = ()
    for line_number, line in enumerate(text.splitlines(), 1):
        if table := _TOML_TABLE.fullmatch(line):
            heading = (table[1].strip(),)
            lines.setdefault(heading, line_number)
        elif key := _TOML_KEY.match(line):
            lines.setdefault((*heading, key[1]), line_number)
    return FileText(path, values, lines)


def _read_yaml(path: str) -> FileText:
    import yaml  # deferred to the first YAML file: takes 20 ms

    text = read_text(path, "--config", "flags")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise ConfigError(f"{location}: must be YAML, got {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: must be YAML, got {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:1: must contain keys with values, one per line, such as num-layers: 4")
    lines: dict[tuple[str, ...], int] = {}
    return FileText(path, _node_value(root, (), path, lines, set()), lines)


_YAML_CORE_SCHEMA = (
    (re.compile(r"~|null|Null|NULL|"), lambda text: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
     lambda text: float(re.sub(r"\.(?=[inIN])", "", text))),
)  # fmt: skip
"""The core schema of YAML 1.2: pattern of a plain scalar -> function for its value. All other scalars are text."""


def _node_value(node: Any, keys: tuple[str, ...], path: str, lines: dict[tuple[str, ...], int], seen: set[int]) -> Any:
    """Convert a YAML node, and add the line of each key to ``lines``."""
    location = f"{path}:{node.start_mark.line + 1}"
    if node.id == "scalar":
        if node.style is None and node.tag.startswith("tag:yaml.org,2002:"):
            return next(
                (make(node.value) for pattern, make in _YAML_CORE_SCHEMA if pattern.fullmatch(node.value)), node.value
            )
        if not node.tag.startswith("tag:yaml.org,2002:"):
            raise ConfigError(f"{location}: YAML tags are not supported, got {node.tag}. Remove it")
        return node.value
    if id(node) in seen:
        raise ConfigError(
            f"{location}: YAML aliases of lists and mappings are not supported, got one. Write the list or mapping out"
        )
    seen.add(id(node))
    if node.id == "sequence":
        return [_node_value(item, keys, path, lines, seen) for item in node.value]
    values: dict[str, Any] = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        if key_node.id != "scalar":
            raise ConfigError(f"{path}:{line}: a key must be a name, got a list or a mapping. Write the name of a flag")
        key = key_node.value
        if key in values:
            raise ConfigError(
                f"{path}:{line}: a key may occur only once, got {key!r} again (first on line {lines[(*keys, key)]}). "
                "Remove one"
            )
        lines[(*keys, key)] = line
        values[key] = _node_value(value, (*keys, key), path, lines, seen)
    return values


READERS = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml, ".json": _read_json}


# Map keys to fields.
#
# A key is a flag's name, with - or _, or a field's name as in ``get_args()`` and config.json. Section names may enclose
# keys, as in config.json, and have no effect. Keys that are not flags of this program are passed to ``scan`` as words
# of a command line: it knows the flags of other programs and suggests the nearest name.

RUN_MARKER_KEY = "family"
"""Top-level key that identifies a file as the config.json of a run."""


@dataclass
class ConfigFileResult:
    """Result of ``merge_config_file``, in addition to the values of flags, which are stored in the ``Scan``.

    Args:
        is_run_config: the file is the config.json of a run: defaults of the program and of MEGATRON_DEFAULTS do not
            apply, and its fields do not count as set by the user.
        deepspeed: DeepSpeed's JSON of that run.
        json: top-level keys of the file that are keys of DeepSpeed's JSON, as in the files of GPT-NeoX.
    """

    is_run_config: bool = False
    deepspeed: dict[str, Any] | None = None
    json: dict[str, Any] | None = None


def merge_config_file(scanned: Scan, extra_flags: Iterable[str] = ()) -> ConfigFileResult:
    """Merge the file of --config into ``scanned``, the flags of the command line.

    Args:
        extra_flags: flags of ``extra_args_provider``; their values are added to ``scanned.extra_words``.
    """
    path, result = scanned.values.get("config"), ConfigFileResult()
    if path is None:
        return result
    try:
        text = read_file(path)
    except ConfigError as error:
        scanned.problems.append(str(error))
        return result
    result.is_run_config = isinstance(text.values.get(RUN_MARKER_KEY), str)
    reader = _Reader(text, scanned.family, tuple(extra_flags), result.is_run_config)
    values = reader.read()
    scanned.problems += reader.problems
    scanned.unknown |= reader.unknown
    scanned.notes += reader.notes
    scanned.extra_words[:0] = reader.extra_words
    scanned.ignored = {**reader.ignored, **scanned.ignored}
    if reader.json:
        key_positions = {keys: (line, 1) for keys, line in text.lines.items()}
        result.json, problems, ignored = validate_keys(JsonText(path, reader.json, key_positions))
        scanned.problems += problems
        scanned.ignored |= ignored
    has_problems = bool(set(reader.problems) - reader.unknown.keys())
    if result.is_run_config and not has_problems:
        values = _without_derived(values, scanned.family)
        values = _without_derived_lengths(values, reader.converted, text.values, scanned)
    for flag in related_fields.overridden_flags(reader.converted, scanned):
        del reader.converted[flag]
    settings = related_fields.settings_of(scanned)
    for name in [name for name in values if related_fields.setting_of(name) in settings and name not in scanned.values]:
        del values[name]
    for name in related_fields.fallback_fields(scanned) & values.keys():
        del scanned.values[name]
    scanned.converted = {**reader.converted, **scanned.converted}
    if has_problems:
        return result
    if result.is_run_config:
        values = {**_former_defaults(text.values, scanned), **values}
        values = _drop_own_run_dir(values, Path(path))
        if "deepspeed_config" not in scanned.values:
            json_text = JsonText(path, _without_max_grad_norm(text.values.get("deepspeed") or {}), {})
            result.deepspeed, problems, _ = validate_keys(json_text)
            scanned.problems += problems
            values["deepspeed_config"] = None
    for name in related_fields.fields_replaced_in_file(values, scanned.values):
        del values[name]
    origins = {name: reader.origins.get(name, path) for name in values}
    written = {name: f"{origins[name]} {value}" for name, value in values.items()}
    for name, setting in merge(
        [Layer(COMMAND_LINE, scanned.values), Layer(CONFIG_FILE, values, written)], scanned
    ).items():
        if setting.source is CONFIG_FILE:
            scanned.values[name], scanned.spelling[name] = setting.value, setting.written
            scanned.from_file[name] = origins[name]
    return result


class _Reader:
    """Reads the keys of a file, and collects values, notes and problems."""

    def __init__(self, text: FileText, family: str, extra_flags: tuple[str, ...], is_run_config: bool) -> None:
        self.text, self.family, self.is_run_config = text, family, is_run_config
        self.known: dict[str, tuple[Option, str]] = {}  # normalised name -> option, and the flag of that name
        for option in family_options(family):
            self.known.update({_normalize(flag): (option, flag) for flag in option.flags})
        for option in family_options(family):
            self.known[option.name] = (option, "")
        self.extras = {_normalize(flag): flag for flag in extra_flags}
        self.other_family_fields = {option.name for _, option in all_options()} - set(self.known)
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.fallback_fields: set[str] = set()  # fields set by foreign flags that yield to the field's own flag
        self.problems: list[str] = []
        self.unknown: dict[str, str] = {}
        self.json: dict[str, Any] = {}
        self.notes: list[str] = []
        self.extra_words: list[str] = []
        self.ignored: dict[str, str] = {}
        self.converted: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Read all keys into field -> value."""
        for keys, value in self._leaves():
            self._read_key(keys, value)
        return self.values

    def _leaves(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        headings = dict.fromkeys([*all_sections(), *FAMILIES])
        for key, value in self.text.values.items():
            if self.is_run_config and key == RUN_MARKER_KEY:
                self._check_family(value)
            elif self.is_run_config and key in ("deepspeed", "extra"):
                for name, inner in value.items() if key == "extra" else ():
                    yield (key, name), inner
            elif not self.is_run_config and self._is_deepspeed_key(key, value, headings):
                self.json[key] = value
            elif isinstance(value, dict) and RENAMED_SECTIONS.get(key, key) in headings:
                for name, inner in value.items():
                    yield (key, name), inner
            elif isinstance(value, dict):
                message = unknown_message("section", key, headings).partition("; --help-all")[0]
                problem = f"{self.text.location(key)}: {message}; a section is one of {', '.join(headings)}"
                self.problems.append(problem)
                self.unknown[problem] = key
            else:
                yield (key,), value

    def _is_deepspeed_key(self, key: str, value: Any, headings: Container[str]) -> bool:
        """Return True for a key of DeepSpeed's JSON, False for a flag.

        A section named like one of ours, such as "optimizer", is DeepSpeed's if it contains "type".
        """
        if key not in deepspeed_keys.KNOWN and key not in deepspeed_keys.RENAMED:
            return False
        if isinstance(value, dict):
            return key not in headings or "type" in value
        return _normalize(key) not in self.known and _normalize(key) not in self.extras

    def _check_family(self, family: str) -> None:
        if family == self.family:
            return
        program = f"use {FAMILIES[family].command}" if family in FAMILIES else "it was written by another program"
        self.problems.append(
            f"{self.text.location(RUN_MARKER_KEY)}: the file must be from a run of {FAMILIES[self.family].title}, got "
            f"family {family}: {program}"
        )

    def _read_key(self, keys: tuple[str, ...], value: Any) -> None:
        key, location = keys[-1], self.text.location(*keys)
        name = _normalize(key)
        if keys[0] == "extra" or name in self.extras:
            self.extra_words += _to_words(self.extras.get(name, f"--{key}"), value) if name in self.extras else []
        elif name == "config":
            if not self.is_run_config:
                self.problems.append(f"{location}: {key} is accepted on the command line only. Remove it here")
        elif name in self.known:
            self._read_option(*self.known[name], key, location, value)
        elif not (self.is_run_config and (name in self.other_family_fields or key in FIELDS_WITHOUT_FLAG)):
            self._read_foreign_key(name, key, location, value)

    def _read_option(self, option: Option, flag: str, key: str, location: str, value: Any) -> None:
        label = f"{location}: {key}"
        try:
            is_set, value = self._value_of(option, flag, value)
        except ValueError as error:
            self.problems.append(f"{label} must be {error}")
            return
        if not is_set:
            return
        if option.name in self.origins and option.name not in self.fallback_fields:
            self.problems.append(
                f"{label} sets the same field as {self.origins[option.name]}: a flag may occur only once. Remove one"
            )
            return
        self.origins[option.name] = label
        self.fallback_fields.discard(option.name)
        problem = option.problem(value, label)
        if problem and not (self.is_run_config and is_derived(option, value)):
            self.problems.append(problem)
        else:
            self.values[option.name] = value

    def _value_of(self, option: Option, flag: str, value: Any) -> tuple[bool, Any]:
        """Convert a value of the file to the field's type.

        Returns:
            Tuple (False if ``value`` leaves the field unset, field value).

        Raises:
            ValueError: the value is invalid; the message has the rule and the value.
        """
        if value is None:
            if option.default is not None:
                raise ValueError(f"{option.rule()}, got no value. Add a value, or remove the key")
            return self.is_run_config, None
        if flag in option.constants:
            if not isinstance(value, bool):
                raise ValueError(f"true or false, got {_describe_value(value)}")
            return value, option.constants[flag]
        if value is True and option.alone is not None:
            return True, option.convert(option.alone, flag)[0]
        if isinstance(value, str):
            value = option.synonyms.get(value, value)
        if option.join is not None and not self.is_run_config:
            words = value if isinstance(value, list) else [value]
            if any(isinstance(word, (dict, list, bool)) or word is None for word in words) or not words:
                raise ValueError(f"a string, or a list of strings and numbers, got {_describe_value(value)}")
            text = option.join([str(word) for word in words])
            if not option.is_list and option.read is None:
                return True, text
            value, problem = option.convert(text, option.flag)
            return True, text if problem else value
        if isinstance(value, (dict, list)):
            raise ValueError(f"{option.rule()}, got {_describe_value(value)}")
        if option.read is not None and isinstance(value, str):
            try:
                return True, option.read(value)
            except ValueError:
                raise ValueError(f"{option.rule()}, got {_describe_value(value)}") from None
        if option.value_type == "float" and isinstance(value, int) and not isinstance(value, bool):
            return True, float(value)
        if option.value_type == "str" and not isinstance(value, str):
            raise ValueError(f"{option.rule()}, got {_describe_value(value)}. Quote it if it is meant as a string")
        return True, value

    def _read_foreign_key(self, name: str, key: str, location: str, value: Any) -> None:
        """Read a key that is not a flag of this program. ``scan`` parses it like a flag of another trainer."""
        if isinstance(value, dict):
            self.problems.append(f"{location}: {key} must be a value, got {_describe_value(value)}")
            return
        accepted = FAMILIES[self.family].config.ALWAYS_ON_FLAGS
        names = {_normalize(flag): flag for flag in (*rejected_flags(self.family), *foreign_flags(), *accepted)}
        flag = names.get(name, "--" + name.replace("_", "-"))
        row = foreign_flags().get(flag)
        if row is not None and row.value == "bool" and isinstance(value, bool):
            scanned = scan([flag, str(value).lower()], (), self.family)
        elif value is None or value is False:
            problems = scan([flag], (), self.family).problems  # sets nothing, but an unknown flag is still a problem
            scanned = Scan(self.family, problems=[text for text in problems if text.startswith("unknown ")])
        else:
            scanned = scan(_to_words(flag, value), (), self.family)
        for problem in scanned.problems:
            if problem.startswith("unknown flag "):
                problem = problem.replace(f"unknown flag {flag}", f"unknown key {key}").replace("mean --", "mean ")
                self.unknown[f"{location}: {problem}"] = key
            self.problems.append(f"{location}: {problem}")
        self.notes += [f"{location}: {note}" for note in scanned.notes]
        self.ignored |= scanned.ignored
        self.converted |= scanned.converted
        targets = row.targets if row is not None else ()
        fallback = {name for target in targets if target.is_fallback for name in target.fields}
        plain = {name for target in targets if not target.function for name in target.fields}
        for name, converted in scanned.values.items():
            if name in fallback and name in self.origins:  # the field's own key takes precedence
                continue
            if name in plain and name in self.origins and self.values.get(name, converted) != converted:
                self.problems.append(
                    f"{location}: {key} must agree with {self.origins[name]}, got {name.replace('_', ' ')} {converted} "
                    f"and {self.values[name]}. Remove one of them"
                )
            else:
                self.values[name], self.origins[name] = converted, f"{location}: {key}"
            if name in fallback:
                self.fallback_fields.add(name)


def _normalize(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _to_words(flag: str, value: Any) -> list[str]:
    """Format ``value`` as command-line words: true becomes the flag only, false and null become no words."""
    if value is None or value is False:
        return []
    values = [] if value is True else value if isinstance(value, list) else [value]
    return [flag, *map(str, values)]


def _describe_value(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return repr(value)[:80]


NEEDS_CHECKPOINT = (
    "load", "resume", "load_if_exists", "strict_load", "no_load_optim", "no_load_rng", "load_weights_only", "finetune",
    "allow_data_change", "allow_vocab_change", "resize_vocab",
)  # fmt: skip


def _without_derived_lengths(
    values: Mapping[str, Any], converted: dict[str, Any], saved: Mapping[str, Any], scanned: Scan
) -> dict[str, Any]:
    """Return ``values`` without derived lengths, which the new run computes again.

    If the command line sets the run length, --train-samples and --train-tokens are removed from ``converted``.

    Args:
        values: field -> value of a run's config.json.
        saved: the sections of that config.json.
    """
    values, batch = dict(values), saved.get("batch")
    if not isinstance(batch, dict):
        return values
    limits: dict[str, int] = {
        flag: converted[flag] for flag in ("--train-samples", "--train-tokens") if flag in converted
    }
    if values.get("lr_decay_samples") is not None:
        values.pop("lr_decay_iters", None)  # derived from lr_decay_samples
        if _decays_over_full_run(values, limits, batch, saved):
            del values["lr_decay_samples"]
    if not limits:
        return values
    values.pop("train_iters", None)
    if batch.get("requested_train_iters") is not None:
        values["train_iters"] = batch["requested_train_iters"]
    if "train_iters" in scanned.values or {"--train-samples", "--train-tokens"} & scanned.converted.keys():
        for flag in limits:
            del converted[flag]
    return values


def _decays_over_full_run(
    values: Mapping[str, Any], limits: Mapping[str, int], batch: Mapping[str, Any], saved: Mapping[str, Any]
) -> bool:
    """Return True if ``lr_decay_samples`` equals its default, the run length.

    Args:
        values: field -> value of the run's config.json.
        limits: --train-samples and --train-tokens of the run.
    """
    decay = values["lr_decay_samples"]
    if "--train-samples" in limits:
        return bool(decay == limits["--train-samples"])
    if "--train-tokens" in limits:
        is_only_length = batch.get("requested_train_iters") is None
        by_samples = saved.get("optimizer", {}).get("train_tokens_lr_unit") == "samples"
        length = values.get("enc_seq_length") or batch.get("seq_length") or 1
        return is_only_length and by_samples and bool(decay == limits["--train-tokens"] / length)
    steps, size = batch.get("train_iters"), batch.get("batch_size")
    if not steps or not size or (batch.get("rampup_batch_size") or batch.get("step_batch_size_schedule")) is not None:
        return False
    return bool(saved.get("optimizer", {}).get("lr_decay_iters") == steps and decay % (steps * size) == 0)


def _without_derived(values: dict[str, Any], family: str) -> dict[str, Any]:
    """Return a run's ``values`` without derived values, which the new run computes again."""
    derived = {option.name for option in family_options(family) if is_derived(option, option.default)}
    independent = {name: value for name, value in values.items() if name not in derived}
    derived_values = vars(config_from_values(independent, family=family).namespace())
    return {name: value for name, value in values.items() if name not in derived or derived_values[name] != value}


def _former_defaults(saved: Mapping[str, Any], scanned: Scan) -> dict[str, Any]:
    """Return field -> former default for settings that did not exist when the run was saved.

    A note lists the settings whose default differs from the former one.
    """
    options = {option.name: option for option in family_options(scanned.family)}
    former = {name: value for name, value in former_defaults(saved).items() if name in options.keys() - scanned.values}
    defaults = {name: option.default for name, option in options.items()}
    if changed := list(describe_saved_settings(former, defaults)):
        scanned.notes.append(
            f"former defaults of settings that did not exist when that run was saved: {', '.join(changed)}"
        )
    return former


def _without_max_grad_norm(json: Mapping[str, Any]) -> dict[str, Any]:
    """Remove ``max_grad_norm`` from a run's JSON; earlier versions accepted this key although it had no effect."""
    section = json.get("optimizer")
    if not isinstance(section, dict) or not isinstance(section.get("params"), dict):
        return dict(json)
    params = {name: value for name, value in section["params"].items() if name != "max_grad_norm"}
    return {**json, "optimizer": {**section, "params": params}}


def _drop_own_run_dir(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return ``values`` without ``load`` and ``save`` if they name the run's own folder.

    A repeated run then starts from scratch, as the first run did, and saves to a new folder.
    """
    run_dir, values = path.resolve().parent, dict(values)

    def is_own_run_dir(name: str) -> bool:
        candidate = Path(values.get(name) or "/").resolve()
        return candidate == run_dir or run_dir / "checkpoints" in (candidate, *candidate.parents)

    if is_own_run_dir("load") or values.get("resume"):
        for name in NEEDS_CHECKPOINT:
            values.pop(name, None)
    if is_own_run_dir("save"):
        values["save"] = None
    return values
