"""``--model``: the family that a command line trains, and the settings of its architecture. Does not import torch.

The family determines the available flags, so ``--model`` is read before all other flags. The first source that names a
model decides:

| source | family | precedence of its architecture settings |
|---|---|---|
| --model on the command line | of the named model | below flags of the command line, above the file |
| config.json of a run, by --config | of the run | the file has all settings |
| model in another file of --config | of the named model | below the file, above MEGATRON_DEFAULTS |
| --model in MEGATRON_DEFAULTS | of the named model | below MEGATRON_DEFAULTS, above the program |
| the program | of the program | |

A name has no effect if the next weaker source already selects this model. For example, gpt2 is the model of
``pretrain_gpt.py``, so ``pretrain_gpt.py --model gpt2`` trains with the defaults of Megatron's GPT.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.arguments import config_file
from megatron.arguments.flag_values import all_sections, family_options
from megatron.arguments.scan import Scan
from megatron.arguments.script_defaults import VARIABLE
from megatron.arguments.sources import COMMAND_LINE, CONFIG_FILE, MODEL, PROGRAM, RUN_SCRIPT, Layer, Source
from megatron.config.config import RENAMED_SECTIONS, Config
from megatron.config.decoder import ARCHITECTURE
from megatron.config.model import ModelConfig
from megatron.config.option import options_of
from megatron.errors import ConfigError
from megatron.models.architectures import Architecture, find_architecture, unknown_model_message
from megatron.models.registry import FAMILIES

FLAG, FIELD = "--model", "architecture"
NOT_ACCEPTED = (
    "--model selects the decoder that pretrain_gpt2.py trains, but this program builds its own model. Remove --model, "
    "or use pretrain_gpt2.py"
)


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """The model of a command line.

    Args:
        family: family of the model.
        program: the family that the program trains without ``--model``.
        source: the source that names the model; PROGRAM without ``--model``.
        arch: the architecture of ``--model``; None if the program's model is used.
        names: values of ``--model`` that mean this model.
        recipe: the family by which the flags in MEGATRON_DEFAULTS are parsed; "" for ``family``.
        problem: message about a name that is not a decoder; "" if there is no problem.
    """

    family: str
    program: str
    source: Source = PROGRAM
    arch: Architecture | None = None
    names: tuple[str, ...] = ()
    recipe: str = ""
    problem: str = ""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Field -> value of the architecture."""
        return {} if self.arch is None else self.arch.settings

    def compatible_defaults(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``defaults``, from a weaker source, without the fields of another architecture or family."""
        if self.family == self.program and self.arch is None:
            return dict(defaults)
        options = {option.name for option in family_options(self.family)}
        replaced = ARCHITECTURE if self.arch is not None else ()
        return {name: value for name, value in defaults.items() if name in options and name not in replaced}

    def layers(self, script: dict[str, Any], program: dict[str, Any]) -> list[Layer]:
        """Order the layers of MEGATRON_DEFAULTS, the program and the architecture by precedence.

        Args:
            script: field -> value of MEGATRON_DEFAULTS.
            program: field -> value of ``pretrain(args_defaults=...)``.
        """
        model = Layer(MODEL, dict(self.settings))
        if self.source in (PROGRAM, RUN_SCRIPT):
            return [Layer(RUN_SCRIPT, script), model, Layer(PROGRAM, program)]
        return [model, Layer(RUN_SCRIPT, self.compatible_defaults(script)), Layer(PROGRAM, program)]

    def drop_file_architecture(self, scanned: Scan) -> None:
        """Remove the architecture settings that come from the file of --config if the command line names the model."""
        if self.source is COMMAND_LINE:
            for name in self.settings.keys() & scanned.from_file.keys():
                del scanned.values[name], scanned.spelling[name], scanned.from_file[name]


def choose_model(words: Sequence[str], env: Mapping[str, str], program: str) -> ModelChoice:
    """Choose the model that the command line, --config, MEGATRON_DEFAULTS or the program names.

    Args:
        words: command-line words.
        env: environment with MEGATRON_DEFAULTS.
        program: the family that the program trains without ``--model``.
    """
    choice = ModelChoice(family=program, program=program, names=(program,))
    choice = _choose_by_name(_last_value(_environment_words(env), FLAG), RUN_SCRIPT, choice)
    choice = _choose_by_file(_last_value(words, "--config"), choice)
    return _choose_by_name(_last_value(words, FLAG), COMMAND_LINE, choice)


def _choose_by_name(name: str | None, source: Source, weaker: ModelChoice) -> ModelChoice:
    """Choose the model ``name``; return ``weaker`` if there is no name or if ``weaker`` is the same model."""
    if not name or name in weaker.names:
        return weaker
    arch = find_architecture(name)
    if arch is None:
        return replace(weaker, problem=unknown_model_message(name))
    recipe = arch.family if source is RUN_SCRIPT else weaker.recipe or weaker.family
    return ModelChoice(
        family=arch.family, program=weaker.program, source=source, arch=arch, names=(name,), recipe=recipe
    )


def _choose_by_file(path: str | None, weaker: ModelChoice) -> ModelChoice:
    """Choose by the --config file: the model of the run that wrote it, or the model that it names."""
    try:
        values = config_file.read_file(path).values if path else {}
    except ConfigError:
        return weaker  # the parser reports it
    family, name = values.get(config_file.RUN_MARKER_KEY), _model_name_in(values)
    if not isinstance(family, str):
        return _choose_by_name(name, CONFIG_FILE, weaker)
    if family not in FAMILIES or FAMILIES[family].model_type != "decoder":
        return weaker
    names = (family, name) if name else (family,)
    return ModelChoice(
        family=family, program=weaker.program, source=CONFIG_FILE, names=names, recipe=weaker.recipe or weaker.family
    )


def missing_size_problems(choice: ModelChoice, config: Config) -> Iterator[str]:
    """Yield an error message for each required model size that is not set."""
    if choice.arch is None:
        return
    flags = {option.name: option.flag for option in options_of(ModelConfig)}
    for name in choice.arch.required_fields:
        if not getattr(config.model, name):
            yield f"--model {choice.arch.name} needs {flags[name]}: --model sets no sizes. Add {flags[name]}"


def _last_value(words: Sequence[str], flag: str) -> str | None:
    value = None
    for i, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name == flag:
            following = words[i + 1] if i + 1 < len(words) else ""
            value = text if equals else "" if following.startswith("--") else following
    return value


def _environment_words(env: Mapping[str, str]) -> list[str]:
    try:
        return shlex.split(env.get(VARIABLE, ""))
    except ValueError:
        return []  # the parser reports it


def _model_name_in(values: Mapping[str, Any]) -> str | None:
    """Find the model name in a file of flags, at the top level or in a section."""
    sections = [
        section_values
        for key, section_values in values.items()
        if isinstance(section_values, dict) and RENAMED_SECTIONS.get(key, key) in all_sections()
    ]
    for section in (values, *sections):
        for key in ("model", FLAG, FIELD):
            if isinstance(section.get(key), str):
                return str(section[key])
    return None
