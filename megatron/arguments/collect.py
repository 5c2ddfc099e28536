"""Collect the values of each source: a layer per source, the strongest first. ``sources.merge`` merges them.

A weaker source is read after the stronger ones, because they select it: ``--model`` selects the flags, ``--config`` and
``--deepspeed_config`` name files, and ``--load`` names a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.arguments import config_file, deepspeed_json, model_choice, other_programs, script_defaults, translate
from megatron.arguments.deepspeed_json import text_of_value
from megatron.arguments.extra_flags import ExtraFlags
from megatron.arguments.flag_values import scan
from megatron.arguments.model_choice import ModelChoice
from megatron.arguments.scan import Scan
from megatron.arguments.sources import (
    CHECKPOINT,
    CHECKPOINT_SCHEDULE,
    COMMAND_LINE,
    CONFIG_FILE,
    DEEPSPEED_DEFAULT,
    MODEL,
    Layer,
    values_of,
)

CheckpointArgs = Callable[[Scan, Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The values of all sources.

    Args:
        found: flags of the command line and --config; problems and notes of all sources.
        layers: the strongest first.
        json: DeepSpeed's JSON.
        extra: flag of ``extra_args_provider`` -> value.
        is_of_run: the file of --config is the config.json of a run.
    """

    found: Scan
    layers: list[Layer]
    json: dict[str, Any]
    extra: dict[str, Any]
    is_of_run: bool


def collect(
    words: Sequence[str],
    env: Mapping[str, str],
    choice: ModelChoice,
    extras: ExtraFlags,
    defaults: Mapping[str, Any],
    *,
    accepts_model: bool,
    checkpoint_args: CheckpointArgs | None,
) -> Collected:
    """Read all sources; the arguments are those of ``parse``."""
    # command line and --config
    found = scan(words, extras.flags, choice.family)
    file = config_file.take(found, extras.flags)
    choice.replace_file(found)
    if choice.problem:
        found.problems.append(choice.problem)
        found.values.pop(model_choice.FIELD, None)

    # --model, MEGATRON_DEFAULTS and the program
    program = choice.taken(other_programs.defaults_of(found, defaults))
    program = script_defaults.of_script(program, found)
    script = script_defaults.of_environment(env, found, extras.flags, choice.recipe)
    if not accepts_model:
        given = {**script, **({} if file.is_of_run else found.values)}
        found.problems += [model_choice.NOT_ACCEPTED] if given.get(model_choice.FIELD) else []
    weaker = choice.layers(script, program)
    if values_of(weaker).get("config"):
        found.problems.append("--config is read from the command line alone, got it in the defaults. Move it there")
    _drop(("config",), weaker)
    if file.is_of_run:  # the file has every setting
        weaker = [layer for layer in weaker if layer.source is MODEL and choice.source is COMMAND_LINE]
    _drop(translate.skip_train(found, values_of(weaker)), weaker)

    # DeepSpeed's JSON, whose omitted parameters have DeepSpeed's defaults
    json = file.deepspeed or _read_json(found, values_of(weaker))
    if file.json:
        if json:
            found.problems.append(
                "the file of --config has keys of DeepSpeed's JSON, got --deepspeed_config too. Leave one out"
            )
        json = file.json
    stated = {} if file.deepspeed else json  # the fields of a repeated run have the values of its JSON
    found.implied = deepspeed_json.implied_values(stated, {**values_of(weaker), **found.values})

    # checkpoint
    if checkpoint_args is not None and {"load", "resume"} & (values_of(weaker).keys() | found.values.keys()):
        weaker.insert(0, Layer(CHECKPOINT, checkpoint_args(found, values_of(weaker))))

    if implied := {name: value for name, value in found.implied.items() if name not in values_of(weaker)}:
        listed = ", ".join(f"{name} {text_of_value(value)}" for name, value in implied.items())
        found.notes.append(f"DeepSpeed's defaults for what the JSON's optimizer section omits: {listed}")
    weaker.append(Layer(DEEPSPEED_DEFAULT, found.implied))
    extra = extras.values(found)
    typed = {name: value for name, value in found.values.items() if name not in found.from_file}
    of_file = {name: value for name, value in found.values.items() if name in found.from_file}
    layers = [
        Layer(CHECKPOINT_SCHEDULE, found.schedule),
        Layer(COMMAND_LINE, typed, found.spelling),
        Layer(CONFIG_FILE, of_file, found.spelling),
        deepspeed_json.layer_of(stated, found.values, values_of(weaker), found.problems),
        *weaker,
    ]
    return Collected(found=found, layers=layers, json=json, extra=extra, is_of_run=file.is_of_run)


def _drop(names: Sequence[str], layers: Sequence[Layer]) -> None:
    for layer in layers:
        for name in names:
            layer.values.pop(name, None)


def _read_json(found: Scan, defaults: Mapping[str, Any]) -> dict[str, Any]:
    path = found.values.get("deepspeed_config", defaults.get("deepspeed_config"))
    if path is None:
        return {}
    json, problems, ignored = deepspeed_json.read(path)
    found.problems += problems
    found.ignored |= ignored
    unknown = [key for key, reason in ignored.items() if reason == deepspeed_json.UNKNOWN]
    found.notes += [f"{path}: unknown key {key} has no effect" for key in unknown]
    return json
