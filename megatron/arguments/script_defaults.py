"""Two sources of defaults: ``pretrain(args_defaults=...)`` of a program and MEGATRON_DEFAULTS of a run script."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.arguments.flag_values import all_options, family_options, scan, unknown_message
from megatron.arguments.related_fields import overridden_flags
from megatron.arguments.scan import Scan
from megatron.models.registry import FAMILIES

VARIABLE = "MEGATRON_DEFAULTS"
"""Environment variable of a run script: its defaults as flags, quoted for a shell."""


def valid_program_defaults(defaults: Mapping[str, Any], scanned: Scan) -> dict[str, Any]:
    """Select the valid entries in ``pretrain(args_defaults=...)``; problems are added to ``scanned``."""
    family, options = FAMILIES[scanned.family], {option.name: option for _, option in all_options()}
    accepted = {option.name for option in family_options(scanned.family)}
    valid = {}
    for name, value in defaults.items():
        if name not in options:
            scanned.problems.append(unknown_message("name in the defaults of pretrain():", name, options))
        elif name not in accepted:
            scanned.problems.append(
                f"{name} in the defaults of pretrain() is not supported: {family.advice(options[name])}"
            )
        elif problem := options[name].problem(value, f"the default of {name}"):
            scanned.problems.append(problem)
        else:
            valid[name] = value
    return valid


def environment_defaults(
    env: Mapping[str, str], scanned: Scan, extra_flags: Iterable[str], family: str = ""
) -> dict[str, Any]:
    """Parse MEGATRON_DEFAULTS into field -> value.

    Problems, notes, and ignored, converted and extra flags are added to ``scanned``.

    Args:
        extra_flags: flags of ``extra_args_provider``.
        family: family whose flags are accepted; "" for the family of ``scanned``.
    """
    text = env.get(VARIABLE, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        scanned.problems.append(f"{VARIABLE} must be flags in shell syntax, got {text!r}: {error}")
        return {}
    defaults = scan(words, extra_flags, family or scanned.family)
    scanned.problems += [f"{VARIABLE}: {problem}" for problem in defaults.problems]
    scanned.unknown |= {f"{VARIABLE}: {problem}": typed for problem, typed in defaults.unknown.items()}
    scanned.notes += defaults.notes
    scanned.ignored = defaults.ignored | scanned.ignored
    overridden = overridden_flags(defaults.converted, scanned)
    scanned.converted |= {flag: value for flag, value in defaults.converted.items() if flag not in overridden}
    scanned.extra_words[:0] = defaults.extra_words
    if "tokenizer_type" not in scanned.values:
        scanned.unknown_tokenizer_type = scanned.unknown_tokenizer_type or defaults.unknown_tokenizer_type
    return defaults.values
