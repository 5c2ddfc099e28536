"""--config: flags from a YAML, TOML or JSON file, or from the config.json of a run. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.arguments import deepspeed_keys, related_fields
from megatron.arguments.deepspeed_json import JsonText, good_keys, read_json, text_of
from megatron.arguments.flag_values import (
    all_options,
    all_sections,
    config_from_values,
    options_in,
    rejected_flags,
    scan,
    unknown,
)
from megatron.arguments.foreign_flags import foreign_flags
from megatron.arguments.scan import Scan
from megatron.arguments.sources import COMMAND_LINE, CONFIG_FILE, Layer, merge
from megatron.config.changed_defaults import describe_kept, former_defaults
from megatron.config.config import UNNAMED
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
    """Contents of a file, and the lines of its keys.

    Args:
        lines: keys from the root -> line number.
    """

    path: str
    values: dict[str, Any]
    lines: Mapping[tuple[str, ...], int]

    def where(self, *keys: str) -> str:
        """Return "file:line" of a key; ``keys`` is the path from the root, such as ("model", "num_layers")."""
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
    return FileText(path, text.values, {keys: line for keys, (line, _) in text.places.items()})


_TABLE = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?")
_KEY = re.compile(r"\s*([\w-]+)\s*=")


def _read_toml(path: str) -> FileText:
    import tomllib  # deferred to the first TOML file: takes 5 ms

    text = text_of(path, "--config", "flags")
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
        if table := _TABLE.fullmatch(line):
            heading = (table[1].strip(),)
            lines.setdefault(heading, line_number)
        elif key := _KEY.match(line):
            lines.setdefault((*heading, key[1]), line_number)
    return FileText(path, values, lines)


def _read_yaml(path: str) -> FileText:
    import yaml  # deferred to the first YAML file: takes 20 ms

    text = text_of(path, "--config", "flags")
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
    return FileText(path, _mapping(root, (), path, lines, set()), lines)


_CORE = (
    (re.compile(r"~|null|Null|NULL|"), lambda text: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
     lambda text: float(re.sub(r"\.(?=[inIN])", "", text))),
)  # fmt: skip
"""The core schema of YAML 1.2: pattern of a plain scalar -> function for its value. All other scalars are text."""


def _mapping(node: Any, keys: tuple[str, ...], path: str, lines: dict[tuple[str, ...], int], seen: set[int]) -> Any:
    """Return the value of a YAML node, and add the lines of its keys to ``lines``."""
    location = f"{path}:{node.start_mark.line + 1}"
    if node.id == "scalar":
        if node.style is None and node.tag.startswith("tag:yaml.org,2002:"):
            return next((make(node.value) for pattern, make in _CORE if pattern.fullmatch(node.value)), node.value)
        if not node.tag.startswith("tag:yaml.org,2002:"):
            raise ConfigError(f"{location}: YAML tags are not supported, got {node.tag}. Remove it")
        return node.value
    if id(node) in seen:
        raise ConfigError(
            f"{location}: YAML aliases of lists and mappings are not supported, got one. Write the list or mapping out"
        )
    seen.add(id(node))
    if node.id == "sequence":
        return [_mapping(item, keys, path, lines, seen) for item in node.value]
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
        values[key] = _mapping(value, (*keys, key), path, lines, seen)
    return values


READERS = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml, ".json": _read_json}


# Map keys to fields.
#
# A key is a flag's name, with - or _, or a field's name as in ``get_args()`` and config.json. Section names may enclose
# keys, as in config.json, and have no effect. Keys that are not flags of this program are passed to ``scan`` as words
# of a command line: it knows the flags of other programs and suggests the nearest name.

OF_RUN = "family"
"""Top-level key that identifies a file as the config.json of a run."""


@dataclass
class Taken:
    """Result of ``take``, in addition to the values of flags, which ``take`` stores in the ``Scan``.

    Args:
        is_of_run: the file is the config.json of a run: defaults of the program and of MEGATRON_DEFAULTS do not apply,
            and its fields do not count as set by the user.
        deepspeed: DeepSpeed's JSON of that run.
        json: top-level keys of the file that are keys of DeepSpeed's JSON, as in the files of GPT-NeoX.
    """

    is_of_run: bool = False
    deepspeed: dict[str, Any] | None = None
    json: dict[str, Any] | None = None


def take(found: Scan, extra_flags: Iterable[str] = ()) -> Taken:
    """Merge the file of --config into ``found``, the flags of the command line.

    Args:
        extra_flags: flags of ``extra_args_provider``; their values are added to ``found.rest``.
    """
    path, contents = found.values.get("config"), Taken()
    if path is None:
        return contents
    try:
        text = read_file(path)
    except ConfigError as error:
        found.problems.append(str(error))
        return contents
    contents.is_of_run = isinstance(text.values.get(OF_RUN), str)
    reader = _Reader(text, found.family, tuple(extra_flags), contents.is_of_run)
    values = reader.read()
    found.problems += reader.problems
    found.unknown |= reader.unknown
    found.notes += reader.notes
    found.rest[:0] = reader.rest
    found.ignored = {**reader.ignored, **found.ignored}
    if reader.json:
        key_places = {keys: (line, 1) for keys, line in text.lines.items()}
        contents.json, problems, ignored = good_keys(JsonText(path, reader.json, key_places))
        found.problems += problems
        found.ignored |= ignored
    has_problems = bool(set(reader.problems) - reader.unknown.keys())
    if contents.is_of_run and not has_problems:
        values = _without_derived(values, found.family)
        values = _with_length(values, reader.converted, text.values, found)
    for flag in related_fields.overridden_flags(reader.converted, found):
        del reader.converted[flag]
    settings = related_fields.settings_of(found)
    for name in [name for name in values if related_fields.setting_of(name) in settings and name not in found.values]:
        del values[name]
    for name in related_fields.yielding_fields(found) & values.keys():
        del found.values[name]
    found.converted = {**reader.converted, **found.converted}
    if has_problems:
        return contents
    if contents.is_of_run:
        values = {**_former_defaults(text.values, found), **values}
        values = _begin_anew(values, Path(path))
        if "deepspeed_config" not in found.values:
            json_text = JsonText(path, _without_max_grad_norm(text.values.get("deepspeed") or {}), {})
            contents.deepspeed, problems, _ = good_keys(json_text)
            found.problems += problems
            values["deepspeed_config"] = None
    for name in related_fields.fields_replaced_in_file(values, found.values):
        del values[name]
    origins = {name: reader.places.get(name, path) for name in values}
    written = {name: f"{origins[name]} {value}" for name, value in values.items()}
    for name, setting in merge([Layer(COMMAND_LINE, found.values), Layer(CONFIG_FILE, values, written)], found).items():
        if setting.source is CONFIG_FILE:
            found.values[name], found.spelling[name] = setting.value, setting.written
            found.from_file[name] = origins[name]
    return contents


class _Reader:
    """Reader for the keys of a file, which collects values, notes and problems."""

    def __init__(self, text: FileText, family: str, extra_flags: tuple[str, ...], is_of_run: bool) -> None:
        self.text, self.family, self.is_of_run = text, family, is_of_run
        self.known: dict[str, tuple[Option, str]] = {}  # normalised name -> option, and the flag of that name
        for option in options_in(family):
            self.known.update({_normal(flag): (option, flag) for flag in option.flags})
        for option in options_in(family):
            self.known[option.name] = (option, "")
        self.extras = {_normal(flag): flag for flag in extra_flags}
        self.foreign = {option.name for _, option in all_options()} - set(self.known)
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.yielded: set[str] = set()  # fields set by foreign flags that yield to the field's own flag
        self.problems: list[str] = []
        self.unknown: dict[str, str] = {}
        self.json: dict[str, Any] = {}
        self.notes: list[str] = []
        self.rest: list[str] = []
        self.ignored: dict[str, str] = {}
        self.converted: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Return field -> value."""
        for keys, value in self._leaves():
            self._read_key(keys, value)
        return self.values

    def _leaves(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        headings = dict.fromkeys([*all_sections(), *FAMILIES])
        for key, value in self.text.values.items():
            if self.is_of_run and key == OF_RUN:
                self._check_family(value)
            elif self.is_of_run and key in ("deepspeed", "extra"):
                for name, inner in value.items() if key == "extra" else ():
                    yield (key, name), inner
            elif not self.is_of_run and self._is_of_deepspeed(key, value, headings):
                self.json[key] = value
            elif isinstance(value, dict) and key in headings:
                for name, inner in value.items():
                    yield (key, name), inner
            elif isinstance(value, dict):
                message = unknown("section", key, headings).partition("; --help-all")[0]
                problem = f"{self.text.where(key)}: {message}; a section is one of {', '.join(headings)}"
                self.problems.append(problem)
                self.unknown[problem] = key
            else:
                yield (key,), value

    def _is_of_deepspeed(self, key: str, value: Any, headings: Container[str]) -> bool:
        """Return True if ``key`` is a key of DeepSpeed's JSON and not a flag.

        A section with the name of one of our sections, such as "optimizer", is DeepSpeed's if it contains "type".
        """
        if key not in deepspeed_keys.KNOWN and key not in deepspeed_keys.RENAMED:
            return False
        if isinstance(value, dict):
            return key not in headings or "type" in value
        return _normal(key) not in self.known and _normal(key) not in self.extras

    def _check_family(self, family: str) -> None:
        if family == self.family:
            return
        program = f"use {FAMILIES[family].command}" if family in FAMILIES else "it was written by another program"
        self.problems.append(
            f"{self.text.where(OF_RUN)}: the file must be from a run of {FAMILIES[self.family].title}, got family "
            f"{family}: {program}"
        )

    def _read_key(self, keys: tuple[str, ...], value: Any) -> None:
        key, location = keys[-1], self.text.where(*keys)
        name = _normal(key)
        if keys[0] == "extra" or name in self.extras:
            self.rest += _words(self.extras.get(name, f"--{key}"), value) if name in self.extras else []
        elif name == "config":
            if not self.is_of_run:
                self.problems.append(f"{location}: {key} is accepted on the command line only. Remove it here")
        elif name in self.known:
            self._take(*self.known[name], key, location, value)
        elif not (self.is_of_run and (name in self.foreign or key in UNNAMED)):
            self._pass_on(name, key, location, value)

    def _take(self, option: Option, flag: str, key: str, place: str, value: Any) -> None:
        label = f"{place}: {key}"
        try:
            is_set, value = self._value_of(option, flag, value)
        except ValueError as error:
            self.problems.append(f"{label} must be {error}")
            return
        if not is_set:
            return
        if option.name in self.places and option.name not in self.yielded:
            self.problems.append(
                f"{label} sets the same field as {self.places[option.name]}: a flag may occur only once. Remove one"
            )
            return
        self.places[option.name] = label
        self.yielded.discard(option.name)
        problem = option.problem(value, label)
        if problem and not (self.is_of_run and is_derived(option, value)):
            self.problems.append(problem)
        else:
            self.values[option.name] = value

    def _value_of(self, option: Option, flag: str, value: Any) -> tuple[bool, Any]:
        """Convert a value of the file to a value of the field.

        Returns:
            Tuple of a bool, False if ``value`` leaves the field unset, and the value of the field.

        Raises:
            ValueError: the value is invalid; the message has the rule and the value.
        """
        if value is None:
            if option.default is not None:
                raise ValueError(f"{option.rule()}, got no value. Add a value, or remove the key")
            return self.is_of_run, None
        if flag in option.constants:
            if not isinstance(value, bool):
                raise ValueError(f"true or false, got {_shown(value)}")
            return value, option.constants[flag]
        if value is True and option.alone is not None:
            return True, option.alone
        if isinstance(value, str):
            value = option.synonyms.get(value, value)
        if option.join is not None and not self.is_of_run:
            words = value if isinstance(value, list) else [value]
            if any(isinstance(word, (dict, list, bool)) or word is None for word in words) or not words:
                raise ValueError(f"a string, or a list of strings and numbers, got {_shown(value)}")
            return True, option.join([str(word) for word in words])
        if isinstance(value, (dict, list)):
            raise ValueError(f"{option.rule()}, got {_shown(value)}")
        if option.read is not None and isinstance(value, str):
            try:
                return True, option.read(value)
            except ValueError:
                raise ValueError(f"{option.rule()}, got {_shown(value)}") from None
        if option.kind == "float" and isinstance(value, int) and not isinstance(value, bool):
            return True, float(value)
        if option.kind == "str" and not isinstance(value, str):
            raise ValueError(f"{option.rule()}, got {_shown(value)}. Quote it if it is meant as a string")
        return True, value

    def _pass_on(self, name: str, key: str, place: str, value: Any) -> None:
        """Read a key that is not a flag of this program with ``scan``, which knows the flags of other trainers."""
        if isinstance(value, dict):
            self.problems.append(f"{place}: {key} must be a value, got {_shown(value)}")
            return
        accepted = FAMILIES[self.family].config.HOLDS
        names = {_normal(flag): flag for flag in (*rejected_flags(self.family), *foreign_flags(), *accepted)}
        flag = names.get(name, "--" + name.replace("_", "-"))
        row = foreign_flags().get(flag)
        if row is not None and row.value == "bool" and isinstance(value, bool):
            scanned = scan([flag, str(value).lower()], (), self.family)
        elif value is None or value is False:
            problems = scan([flag], (), self.family).problems  # sets nothing, but an unknown flag is still a problem
            scanned = Scan(self.family, problems=[text for text in problems if text.startswith("unknown ")])
        else:
            scanned = scan(_words(flag, value), (), self.family)
        for problem in scanned.problems:
            if problem.startswith("unknown flag "):
                problem = problem.replace(f"unknown flag {flag}", f"unknown key {key}").replace("mean --", "mean ")
                self.unknown[f"{place}: {problem}"] = key
            self.problems.append(f"{place}: {problem}")
        self.notes += [f"{place}: {note}" for note in scanned.notes]
        self.ignored |= scanned.ignored
        self.converted |= scanned.converted
        targets = row.targets if row is not None else ()
        yielding = {name for target in targets if target.yields for name in target.fields}
        plain = {name for target in targets if not target.function for name in target.fields}
        for name, converted in scanned.values.items():
            if name in yielding and name in self.places:  # the field's own key takes precedence
                continue
            if name in plain and name in self.places and self.values.get(name, converted) != converted:
                self.problems.append(
                    f"{place}: {key} must agree with {self.places[name]}, got {name.replace('_', ' ')} {converted} and "
                    f"{self.values[name]}. Remove one of them"
                )
            else:
                self.values[name], self.places[name] = converted, f"{place}: {key}"
            if name in yielding:
                self.yielded.add(name)


def _normal(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _words(flag: str, value: Any) -> list[str]:
    """Return ``value`` as words of a command line: true becomes the flag only, false and null become no words."""
    if value is None or value is False:
        return []
    values = [] if value is True else value if isinstance(value, list) else [value]
    return [flag, *map(str, values)]


def _shown(value: Any) -> str:
    """Return a short text for ``value`` in a message."""
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return repr(value)[:80]


NEEDS_CHECKPOINT = (
    "load", "resume", "load_if_exists", "strict_load", "no_load_optim", "no_load_rng", "load_weights_only", "finetune",
    "allow_data_change", "allow_vocab_change", "resize_vocab",
)  # fmt: skip


def _with_length(
    values: Mapping[str, Any], converted: dict[str, Any], saved: Mapping[str, Any], found: Scan
) -> dict[str, Any]:
    """Drop derived lengths from the values of a run's config.json; they are computed again for the new run.

    If the command line sets the length of the run, --train-samples and --train-tokens are removed from ``converted``.
    """
    values, batch = dict(values), saved.get("batch")
    if not isinstance(batch, dict):
        return values
    limits: dict[str, int] = {
        flag: converted[flag] for flag in ("--train-samples", "--train-tokens") if flag in converted
    }
    if values.get("lr_decay_samples") is not None:
        values.pop("lr_decay_iters", None)  # derived from lr_decay_samples
        if _decays_to_the_end(values, limits, batch, saved):
            del values["lr_decay_samples"]
    if not limits:
        return values
    values.pop("train_iters", None)
    if batch.get("requested_train_iters") is not None:
        values["train_iters"] = batch["requested_train_iters"]
    if "train_iters" in found.values or {"--train-samples", "--train-tokens"} & found.converted.keys():
        for flag in limits:
            del converted[flag]
    return values


def _decays_to_the_end(
    values: Mapping[str, Any], limits: Mapping[str, int], batch: Mapping[str, Any], saved: Mapping[str, Any]
) -> bool:
    """Return True if ``lr_decay_samples`` equals the length of the run, which is its default.

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
    if not steps or not size or batch.get("rampup_batch_size") is not None:
        return False
    return bool(saved.get("optimizer", {}).get("lr_decay_iters") == steps and decay % (steps * size) == 0)


def _without_derived(values: dict[str, Any], family: str) -> dict[str, Any]:
    """Drop the derived values of a run's config.json; they are computed again for the new run."""
    derived = {option.name for option in options_in(family) if is_derived(option, option.default)}
    independent = {name: value for name, value in values.items() if name not in derived}
    derived_values = vars(config_from_values(independent, family=family).namespace())
    return {name: value for name, value in values.items() if name not in derived or derived_values[name] != value}


def _former_defaults(saved: Mapping[str, Any], found: Scan) -> dict[str, Any]:
    """Return the former defaults of settings that did not exist when the run was started; a note lists them."""
    options = {option.name: option for option in options_in(found.family)}
    former = {name: value for name, value in former_defaults(saved).items() if name in options.keys() - found.values}
    defaults = {name: option.default for name, option in options.items()}
    if changed := list(describe_kept(former, defaults)):
        found.notes.append(
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


def _begin_anew(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Drop ``load`` and ``save`` if they name the run's own folder.

    A repeated run then starts from scratch, as the first run did, and saves to a new folder.
    """
    run_dir, values = path.resolve().parent, dict(values)

    def is_own(name: str) -> bool:
        candidate = Path(values.get(name) or "/").resolve()
        return candidate == run_dir or run_dir / "checkpoints" in (candidate, *candidate.parents)

    if is_own("load") or values.get("resume"):
        for name in NEEDS_CHECKPOINT:
            values.pop(name, None)
    if is_own("save"):
        values["save"] = None
    return values
