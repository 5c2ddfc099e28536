"""Two sources of defaults: ``pretrain(args_defaults=...)`` of a program and MEGATRON_DEFAULTS of a run script."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.arguments.flag_values import all_options, options_in, scan, unknown
from megatron.arguments.related_fields import overridden_flags
from megatron.arguments.scan import Scan
from megatron.models.registry import FAMILIES

VARIABLE = "MEGATRON_DEFAULTS"
"""Environment variable of a run script: its defaults as flags, quoted for a shell."""


def of_script(defaults: Mapping[str, Any], found: Scan) -> dict[str, Any]:
    """Return the valid entries of ``pretrain(args_defaults=...)``; problems are added to ``found``."""
    family, options = FAMILIES[found.family], {option.name: option for _, option in all_options()}
    accepted = {option.name for option in options_in(found.family)}
    valid = {}
    for name, value in defaults.items():
        if name not in options:
            found.problems.append(unknown("name in the defaults of pretrain():", name, options))
        elif name not in accepted:
            found.problems.append(
                f"{name} in the defaults of pretrain() is not supported: {family.advice(options[name])}"
            )
        elif problem := options[name].problem(value, f"the default of {name}"):
            found.problems.append(problem)
        else:
            valid[name] = value
    return valid


def of_environment(env: Mapping[str, str], found: Scan, extra_flags: Iterable[str], family: str = "") -> dict[str, Any]:
    """Parse MEGATRON_DEFAULTS into field -> value.

    Problems, notes, and ignored, converted and extra flags are added to ``found``.

    Args:
        extra_flags: flags of ``extra_args_provider``.
        family: family whose flags are accepted; "" for the family of ``found``.
    """
    text = env.get(VARIABLE, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        found.problems.append(f"{VARIABLE} must be flags in shell syntax, got {text!r}: {error}")
        return {}
    defaults = scan(words, extra_flags, family or found.family)
    found.problems += [f"{VARIABLE}: {problem}" for problem in defaults.problems]
    found.unknown |= {f"{VARIABLE}: {problem}": typed for problem, typed in defaults.unknown.items()}
    found.notes += defaults.notes
    found.ignored = defaults.ignored | found.ignored
    overridden = overridden_flags(defaults.converted, found)
    found.converted |= {flag: value for flag, value in defaults.converted.items() if flag not in overridden}
    found.rest[:0] = defaults.rest
    if "tokenizer_type" not in found.values:
        found.unknown_tokenizer_type = found.unknown_tokenizer_type or defaults.unknown_tokenizer_type
    return defaults.values
