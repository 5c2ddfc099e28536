"""Read each source of values into a layer. ``sources.merge`` merges the layers, the strongest first.

The strongest source is read first, because stronger sources determine how weaker ones are read: ``--model`` selects
the flags, ``--config`` and ``--deepspeed_config`` name files, and ``--load`` names a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.arguments import config_file, deepspeed_json, model_choice, other_programs, script_defaults, translate
from megatron.arguments.deepspeed_json import format_value
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
    merged_values,
)

CheckpointArgs = Callable[[Scan, Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Values from all sources.

    Args:
        scanned: flags of the command line and --config; problems and notes of all sources.
        layers: layers in order of precedence, the strongest first.
        json: DeepSpeed's JSON.
        extra: flag of ``extra_args_provider`` -> value.
        is_run_config: True if the file of --config is the config.json of a run.
    """

    scanned: Scan
    layers: list[Layer]
    json: dict[str, Any]
    extra: dict[str, Any]
    is_run_config: bool


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
    """Read all sources. ``parse`` documents the arguments."""
    # command line and --config
    scanned = scan(words, extras.flags, choice.family)
    file = config_file.merge_config_file(scanned, extras.flags)
    choice.drop_file_architecture(scanned)
    if choice.problem:
        scanned.problems.append(choice.problem)
        scanned.values.pop(model_choice.FIELD, None)

    # --model, MEGATRON_DEFAULTS and the program
    program = choice.compatible_defaults(other_programs.defaults_of(scanned, defaults))
    program = script_defaults.valid_program_defaults(program, scanned)
    script = script_defaults.environment_defaults(env, scanned, extras.flags, choice.recipe)
    if not accepts_model:
        explicit = {**script, **({} if file.is_run_config else scanned.values)}
        scanned.problems += [model_choice.NOT_ACCEPTED] if explicit.get(model_choice.FIELD) else []
    weaker = choice.layers(script, program)
    if merged_values(weaker).get("config"):
        scanned.problems.append(
            "--config is accepted on the command line only, got --config in the defaults. Move it to the command line"
        )
    _drop_fields(("config",), weaker)
    if file.is_run_config:  # the config.json of a run has every setting
        weaker = [layer for layer in weaker if layer.source is MODEL and choice.source is COMMAND_LINE]
    _drop_fields(translate.convert_skip_train(scanned, merged_values(weaker)), weaker)

    # DeepSpeed's JSON, whose omitted parameters have DeepSpeed's defaults
    json = file.deepspeed or _read_json(scanned, merged_values(weaker))
    if file.json:
        if json:
            scanned.problems.append(
                "the file of --config has keys of DeepSpeed's JSON, got --deepspeed_config too. Remove one of them"
            )
        json = file.json
    stated_json = {} if file.deepspeed else json  # a config.json already contains the values of the run's JSON
    scanned.implied = deepspeed_json.implied_values(stated_json, {**merged_values(weaker), **scanned.values})

    # checkpoint
    if checkpoint_args is not None and {"load", "resume"} & (merged_values(weaker).keys() | scanned.values.keys()):
        weaker.insert(0, Layer(CHECKPOINT, checkpoint_args(scanned, merged_values(weaker))))

    if implied := {name: value for name, value in scanned.implied.items() if name not in merged_values(weaker)}:
        listed = ", ".join(f"{name} {format_value(value)}" for name, value in implied.items())
        scanned.notes.append(f"DeepSpeed's defaults for parameters missing from the JSON's optimizer section: {listed}")
    weaker.append(Layer(DEEPSPEED_DEFAULT, scanned.implied))
    extra = extras.values(scanned)
    command_line_values = {name: value for name, value in scanned.values.items() if name not in scanned.from_file}
    file_values = {name: value for name, value in scanned.values.items() if name in scanned.from_file}
    layers = [
        Layer(CHECKPOINT_SCHEDULE, scanned.schedule),
        Layer(COMMAND_LINE, command_line_values, scanned.spelling),
        Layer(CONFIG_FILE, file_values, scanned.spelling),
        deepspeed_json.json_layer(stated_json, scanned.values, merged_values(weaker), scanned.problems),
        *weaker,
    ]
    return Collected(scanned=scanned, layers=layers, json=json, extra=extra, is_run_config=file.is_run_config)


def _drop_fields(names: Sequence[str], layers: Sequence[Layer]) -> None:
    for layer in layers:
        for name in names:
            layer.values.pop(name, None)


def _read_json(scanned: Scan, defaults: Mapping[str, Any]) -> dict[str, Any]:
    path = scanned.values.get("deepspeed_config", defaults.get("deepspeed_config"))
    if path is None:
        return {}
    json, problems, ignored = deepspeed_json.read(path)
    scanned.problems += problems
    scanned.ignored |= ignored
    unknown_keys = [key for key, reason in ignored.items() if reason == deepspeed_json.UNKNOWN]
    scanned.notes += [f"{path}: unknown key {key} has no effect" for key in unknown_keys]
    return json
