"""Words of the command line to values, all mistakes collected; defaults of script and environment, batch
arithmetic, chunks from layers.
"""

from __future__ import annotations

import difflib
import functools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron.arguments import precedence, translate
from megatron.arguments.foreign_flags import CONVERTED, REJECTED, ForeignFlag, flags_with, foreign_flag, foreign_flags
from megatron.arguments.scan import Scan
from megatron.config.batch import BatchConfig
from megatron.config.config import FIRST_FAMILY, SECTIONS, Config
from megatron.config.data import EACH, PATHS
from megatron.config.family import ModelFamily
from megatron.config.model import ModelConfig
from megatron.config.option import Option, options_of
from megatron.models.registry import FAMILIES, family_of

# All flags there are, and a Config from the values of their fields.


def all_sections() -> dict[str, type]:
    """Return name -> dataclass of every section: the groups of --help in their order, those of the families in it."""
    own = {family.name: family.config for family in FAMILIES.values() if family.has_section}
    return {"model": SECTIONS["model"], **own, **SECTIONS}


def all_options() -> tuple[tuple[str, Option], ...]:
    """Return (section, option) for every flag of ours."""
    return _options(tuple(FAMILIES.values()))


@functools.cache
def _options(families: tuple[ModelFamily, ...]) -> tuple[tuple[str, Option], ...]:
    return tuple((name, item) for name, section in all_sections().items() for item in options_of(section))


def takes(family: str, section: str, option: Option) -> bool:
    """Return whether a run of ``family`` takes a flag of ``section``."""
    return FAMILIES[family].takes(option, section, is_own=section not in SECTIONS)


def options_in(family: str) -> list[Option]:
    """Return the flags that a run of ``family`` takes."""
    return [option for section, option in all_options() if takes(family, section, option)]


def config_from_values(values: Mapping[str, Any], *, family: str = FIRST_FAMILY, **others: Any) -> Config:
    """Return a Config from flat field names to values; what is missing takes its default in the family.

    Args:
        others: further fields of ``Config``.

    Raises:
        TypeError: a name that no section has.
        ValueError: there is no such family.
    """
    own = family_of(family).config
    unknown = values.keys() - {option.name for _, option in all_options()}
    if unknown:
        raise TypeError(f"each name must be a field of a section, got {', '.join(sorted(unknown))}")
    values = {**own.DEFAULTS, **values}
    sections = {
        name: section(**{option.name: values[option.name] for option in options_of(section) if option.name in values})
        for name, section in {**SECTIONS, "own": own}.items()
    }
    return Config(family=family, **sections, **others)


# From the words of the command line to values: all mistakes are collected, none ends the scan.

LARGEST_COUNT = 2**62
"""Samples and tokens are counted in 64 bits."""
ALIKE = 0.8
"""Share of two names that must be alike for one to be guessed: slips of the hand, no other names of the kind."""


def scan(argv: Sequence[str], extra_flags: Iterable[str] = (), family: str = "gpt2") -> Scan:
    """Read ``argv``; the flags in ``extra_flags`` and their values are added to ``rest``."""
    known = {flag: option for option in options_in(family) for flag in option.flags}
    accepted = FAMILIES[family].config.HOLDS
    extras = set(extra_flags)
    found = Scan(family)
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        with_dashes = flag.replace("_", "-")
        if flag not in extras and flag not in known and with_dashes in known:
            flag = with_dashes
        if flag in extras:
            found.rest += [word, *_values_after(words)]
        elif flag in known:
            _take(found, known[flag], flag, text if equals else None, words)
        elif flag in accepted:
            found.ignored[flag] = accepted[flag]
        elif not flag.startswith("-"):
            found.problems.append(f"every value must follow a flag that takes one, got {word!r} on its own. Remove it")
        else:
            values = [text, *_values_after(words)] if equals else _values_after(words)
            if reason := rejected_flags(family).get(flag):
                found.problems.append(f"{flag} is not supported: {reason}")
            elif row := foreign_flag(flag) or foreign_flag(with_dashes):
                _take_foreign(found, row, values)
            else:
                others = [row.flag for row in foreign_flags().values() if row.rule != REJECTED]
                problem = unknown("flag", flag, [*known, *extras, *others], known)
                found.add_unknown(problem, " ".join([flag, *values]))
    translate.fields_of(found)
    return found


def _take_foreign(found: Scan, row: ForeignFlag, values: list[str]) -> None:
    """Read a flag of another trainer that is ignored or converted."""
    inapplicable = _inapplicable_field(found.family, row)
    if inapplicable is not None:
        found.problems.append(f"{row.flag} is not supported: {FAMILIES[found.family].advice(inapplicable)}")
    elif problem := row.count_problem(values) or row.value_problem(values):
        found.problems.append(problem)
    elif row.rule != CONVERTED:
        found.ignored[" ".join([row.flag, *values]) if row.target else row.flag] = row.note
    elif row.value == "str*":
        found.converted[row.flag] = values
    elif not row.value:
        found.converted[row.flag] = True
    else:
        value, problem = Option(
            name="", flag=row.flag, kind=row.value, default=None, help="", shown_default="", minimum=0,
            maximum=LARGEST_COUNT,
        ).convert(values[0], row.flag)  # fmt: skip
        if problem:
            found.problems.append(problem)
        else:
            found.converted[row.flag] = value


def _inapplicable_field(family: str, row: ForeignFlag) -> Option | None:
    """Return a field that the flag sets and that ``family`` does not have."""
    others = {option.name: option for section, option in all_options() if not takes(family, section, option)}
    taken = {option.name for option in options_in(family)}
    return next((others[name] for name in row.fields if name in others and name not in taken), None)


def rejected_flags(family: str) -> Mapping[str, str]:
    """Return flag -> the reason why ``family`` does not support it, and the alternative."""
    return _rejected_flags(family, tuple(FAMILIES.values()))


@functools.cache
def _rejected_flags(family: str, families: tuple[ModelFamily, ...]) -> Mapping[str, str]:
    this = FAMILIES[family]
    others = [option for section, option in all_options() if not takes(family, section, option)]
    advice = {flag: this.advice(option) for option in others for flag in option.flags}
    advice = {flag: reason for flag, reason in advice.items() if flag not in this.config.HOLDS}
    return {row.flag: row.note for row in flags_with(REJECTED)} | advice | dict(this.config.REFUSED)


def unknown(kind: str, name: str, known: Iterable[str], options: Mapping[str, Option] = MappingProxyType({})) -> str:
    """Return the message for a name that nobody knows, with the nearest one that is accepted.

    Args:
        options: by flag; where no name is near, the first whose help has the words of ``name``.
    """
    names = list(known)
    longer = [other for other in names if other.startswith(name)] if len(name) > 3 else []
    bare = {other.lstrip("-"): other for other in names}  # the dashes are no likeness
    close = difflib.get_close_matches(name.lower().lstrip("-"), bare, n=1, cutoff=ALIKE)
    words = name.lower().lstrip("-").replace("_", "-").replace("-", " ")
    matching = [flag for flag, option in options.items() if " " in words and words in option.help]
    near = longer[:1] or [bare[other] for other in close] or matching[:1]
    return f"unknown {kind} {name}" + (f"; did you mean {near[0]}?" if near else "; --help-all lists all flags")


def is_near(name: str, known: Iterable[str]) -> bool:
    """Return True if ``unknown`` would suggest one of ``known`` for ``name``."""
    return "did you mean" in unknown("name", name, known)


def _values_after(words: list[str]) -> list[str]:
    values = []
    while words and not words[0].startswith("--"):
        values.append(words.pop(0))
    return values


def _take(found: Scan, option: Option, flag: str, text: str | None, words: list[str]) -> None:
    takes_value = option.kind != "bool" and flag not in option.constants
    if not takes_value and text is not None:
        found.problems.append(f"{flag} takes no value, got {text!r}. Write {flag} alone, or leave it out")
        return
    if takes_value and text is None and words and not words[0].startswith("--"):
        text = words.pop(0) if option.join is None else option.join(_values_after(words))
    elif text and option.join is not None:
        text = option.join([text])
    if text is None and option.alone is not None:
        text = option.alone
    if takes_value and not text:
        found.problems.append(f"{flag} needs a value: {option.rule()}; got none. Write {flag} VALUE")
        return
    value, problem = option.convert(text, flag) if text is not None else (option.constants.get(flag, True), None)
    if problem and option.name == "tokenizer_type":
        found.unknown_tokenizer_type = str(text)
        return
    if problem:
        found.problems.append(problem)
        return
    _store(found, option, flag, value, f"{flag} {text}" if text is not None else flag)


def _store(found: Scan, option: Option, flag: str, value: Any, spelling: str) -> None:
    if option.name in found.values:
        if option.name == "dtype" and found.values["dtype"] != value:
            found.problems.append(
                f"give one number format, got {found.spelling['dtype']} and {spelling}. Leave one out"
            )
        if flag not in found.repeated:
            found.repeated.append(flag)
    found.values[option.name] = value
    found.spelling[option.name] = spelling


# Defaults from outside: a script's own ``pretrain(args_defaults=...)`` and MEGATRON_DEFAULTS of a run script.
#
# Both are soft: they hold where neither the command line nor the JSON says otherwise, and MEGATRON_DEFAULTS is the
# stronger of the two. A soft value that contradicts what the user gave steps back instead of becoming an error.

VARIABLE = "MEGATRON_DEFAULTS"
"""Flags, as a shell reads them."""
FLAG_VARIABLES = "MEGATRON_VARIABLES"
"""``--flag=NAME`` for each flag that the run script sets by a variable of its own, so that messages can name both."""


def of_script(defaults: Mapping[str, Any], found: Scan) -> dict[str, Any]:
    """Return the checked defaults of a script; problems are added to ``found``."""
    family, options = FAMILIES[found.family], {option.name: option for _, option in all_options()}
    taken = {option.name for option in options_in(found.family)}
    checked = {}
    for name, value in defaults.items():
        if name not in options:
            found.problems.append(unknown("name in the defaults of pretrain():", name, options))
        elif name not in taken:
            found.problems.append(
                f"{name} in the defaults of pretrain() is not supported: {family.advice(options[name])}"
            )
        elif problem := options[name].problem(value, f"the default of {name}"):
            found.problems.append(problem)
        else:
            checked[name] = value
    return checked


def of_environment(env: Mapping[str, str], found: Scan, extra_flags: Iterable[str], family: str = "") -> dict[str, Any]:
    """Return field -> value of MEGATRON_DEFAULTS; problems, notes and the rest of its flags are added to ``found``.

    Args:
        family: by whose flags it is read; empty: that of ``found``.
    """
    text = env.get(VARIABLE, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        found.problems.append(f"{VARIABLE} must be flags as a shell reads them, got {text!r}: {error}")
        return {}
    defaults = scan(words, extra_flags, family or found.family)
    found.problems += [f"{VARIABLE}: {problem}" for problem in defaults.problems]
    found.unknown |= {f"{VARIABLE}: {problem}": typed for problem, typed in defaults.unknown.items()}
    found.notes += defaults.notes
    found.ignored = defaults.ignored | found.ignored
    overridden = precedence.overridden_flags(defaults.converted, found)
    found.converted |= {flag: value for flag, value in defaults.converted.items() if flag not in overridden}
    found.rest[:0] = defaults.rest
    if "tokenizer_type" not in found.values:
        found.unknown_tokenizer_type = found.unknown_tokenizer_type or defaults.unknown_tokenizer_type
    return defaults.values


WHOLE = {"sequence_parallel": False, "context_parallel_size": 1}
"""Fields with which each rank has all tokens of a sequence."""


def step_back(defaults: dict[str, Any], explicit: Mapping[str, Any], excluded: Iterable[str], notes: list[str]) -> None:
    """Take out of ``soft`` what contradicts ``firm``: values of the command line and the JSON."""
    if defaults.get("dtype") in tuple(excluded):
        del defaults["dtype"]
    if "vocab_file" in explicit or "merge_file" in explicit:
        defaults.pop("tokenizer_path", None)
    if "sft" in explicit:
        for name in PATHS:
            defaults.pop(name, None)
    elif any(name in explicit for name in PATHS):
        defaults.pop("sft", None)
        defaults.pop("valid_sft", None)
    for name in precedence.shadowing_lengths(explicit):
        defaults.pop(name, None)
    if any(name in explicit for name in EACH):
        defaults.pop("data_path", None)
        defaults.pop("split", None)
    elif "data_path" in explicit:
        for name in EACH:
            defaults.pop(name, None)
    if "lr" in explicit and defaults.get("min_lr", 0.0) > explicit["lr"]:
        notes.append(
            f"the default --min-lr {defaults.pop('min_lr'):g} is above --lr {explicit['lr']:g}, so --min-lr is 0"
        )
    cutting = [name for name, whole in WHOLE.items() if explicit.get(name, defaults.get(name, whole)) != whole]
    if "sample_prompts" in defaults and cutting:
        del defaults["sample_prompts"]
        flag = f"--{cutting[0].replace('_', '-')}"
        notes.append(f"no text is shown at the end with {flag}; tools/generate.py shows some from the checkpoint")
    both = {**defaults, **explicit}
    if defaults.get("optimizer") == "adafactor" and (
        "optimizer" in explicit or both.get("model_parallel_size", 1) > 1 or both.get("zero_stage", 0)
    ):
        for name in ("optimizer", "lr"):  # a rate of Adafactor's is far above one of AdamW
            defaults.pop(name, None)
        notes.append("the default --optimizer adafactor and its --lr do not go with what was given, and are left out")
    if "dec_seq_length" in explicit:  # the targets of the defaults may be longer
        for name in ("noise_density", "mean_span_length"):
            defaults.pop(name, None)


def with_typed_flags(problems: list[str], found: Scan) -> list[str]:
    """Return the messages; each that names a flag which the user typed under another name also gives that name."""
    names = {option.name: option.flag for option in options_in(found.family) if option.flag}
    typed = {names[field]: text for field, text in found.spelling.items() if field in names and text.startswith("--")}
    lines = []
    for problem in problems:
        renamed = [
            f"{flag} was given as {text}"
            for flag, text in typed.items()
            if text.split(" ")[0] != flag and _names(problem, flag) and not _names(problem, text.split(" ")[0])
        ]
        lines.append(f"{problem} ({', '.join(renamed)})" if renamed else problem)
    return lines


def _names(text: str, flag: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text) is not None


def with_variables(problems: list[str], env: Mapping[str, str]) -> list[str]:
    """Return the messages; one that names a flag with a variable in the run script names that, too."""
    pairs = [pair.split("=", 1) for pair in env.get(FLAG_VARIABLES, "").split() if "=" in pair]
    lines = []
    for problem in problems:
        known = [f"{flag} is {name}" for flag, name in pairs if re.search(rf"{re.escape(flag)}(?![\w-])", problem)]
        lines.append(f"{problem} (in the run script: {', '.join(known)})" if known else problem)
    return lines


# ``global batch = micro-batch x gas x replicas``: three numbers of which two give the third.

TOTAL = "requested_global_batch_size"
JSON_KEYS = {
    TOTAL: "train_batch_size",
    "batch_size": "train_micro_batch_size_per_gpu",
    "gas": "gradient_accumulation_steps",
}
"""Field -> key of the JSON."""


def resolve_batch_size(
    found: Scan, explicit: Mapping[str, Any], defaults: Mapping[str, Any], world_size: int
) -> dict[str, Any]:
    """Return the sizes that follow from a global batch; a contradiction goes to ``found.problems``.

    With all three stated the product must agree. A size that is only a default follows the others: gas follows the
    micro-batch, the micro-batch follows gas, and with neither stated the micro-batch is the largest that fits and is
    not above its default; with a global batch of the JSON gas is 1, as in DeepSpeed. A global batch that is only a
    default steps back when gas is stated.

    Args:
        firm: field -> value from flags and JSON.
        soft: field -> value from defaults.
    """
    both = {**defaults, **explicit}
    total, t, p = both.get(TOTAL), both.get("model_parallel_size", 1), max(both.get("pipe_parallel_size", 1), 1)
    c = both.get("context_parallel_size", 1)
    if not total or c < 1 or world_size % (t * p * c):
        return {}
    if TOTAL not in explicit and "gas" in explicit:
        return {TOTAL: 0}
    d = world_size // (t * p * c)
    replicas = f"dp = world {world_size} / (tp {t} x pp {p}{f' x cp {c}' if c > 1 else ''})"
    micro, gas = explicit.get("batch_size"), explicit.get("gas")
    if micro and gas:
        if total != micro * gas * d:
            found.problems.append(_disagreement(found, total, micro, gas, d, replicas))
        return {}
    known = [("micro", micro)] if micro else [("gas", gas)] if gas else []
    product = (micro or gas or 1) * d
    if total % product:
        names = " x ".join([*(name for name, _ in known), "dp"])
        terms = " x ".join(f"{name} {size}" for name, size in [*known, ("dp", d)])
        cure = _origin(found, "batch_size" if micro else "gas") + " or the global batch" if known else "it"
        found.problems.append(
            f"train_batch_size must be a multiple of {names}, got {total} and {terms} = {product}; {replicas}. "
            f"Change {cure}"
        )
        return {}
    if known:
        return {"gas" if micro else "batch_size": total // product}
    if TOTAL in explicit and TOTAL not in found.values:  # of the JSON, whose missing accumulation is 1
        return {"batch_size": total // d, "gas": 1}
    samples, most = total // d, defaults.get("batch_size", BatchConfig().batch_size)
    size = max(size for size in range(1, min(most, samples) + 1) if samples % size == 0)
    usual = (most, defaults.get("gas", BatchConfig().gas))
    if (size, samples // size) != usual:
        found.notes.append(
            f"a global batch of {total} on {d} replica{'' if d == 1 else 's'} is --batch-size {size} x --gas "
            f"{samples // size}, in place of {usual[0]} x {usual[1]}; give one of the two to choose"
        )
    return {"batch_size": size, "gas": samples // size}


def _disagreement(found: Scan, total: int, micro: int, gas: int, d: int, replicas: str) -> str:
    product = micro * gas * d
    return (
        f"train_batch_size {total} != micro {micro} x gas {gas} x dp {d} = {product}; {replicas}. "
        f'Set train_batch_size to {product} or "auto", or change {_origin(found, "batch_size")} or '
        f"{_origin(found, 'gas')}"
    )


def _origin(found: Scan, name: str) -> str:
    return found.spelling.get(name, JSON_KEYS[name])


# ``chunks = layers / (stages x layers of a chunk)``: Megatron's way to say how many chunks a stage holds.
#
# The layers of an encoder-decoder are those of both sides.

FLAG = "--num-layers-per-virtual-pipeline-stage"


def resolve_chunks(found: Scan, explicit: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chunks that follow from the layers of one; a contradiction goes to ``found.problems``.

    Args:
        firm: field -> value from flags and JSON.
        soft: field -> value from defaults.
    """
    both = {**defaults, **explicit}
    each, stages = both.get("layers_per_chunk"), both.get("pipe_parallel_size", 0)
    if not each or stages < 2 or ("layers_per_chunk" not in explicit and "pipeline_chunks" in explicit):
        return {}
    layers = both.get("num_layers", ModelConfig().num_layers)
    name = "--num-layers"
    if sides := FAMILIES[found.family].config.SIDES:
        layers = sum(both.get(side) or layers for side in sides)
        name = "the layers of both sides"
    if layers % (stages * each):
        found.problems.append(
            f"{name} must be a multiple of --pipe-parallel-size x {FLAG}, got {layers} and {stages} x {each} = "
            f"{stages * each}. Change one of them, or use --pipeline-chunks, which takes any number of layers"
        )
        return {}
    chunks = layers // (stages * each)
    if explicit.get("pipeline_chunks", chunks) != chunks:
        found.problems.append(
            f"{FLAG} and --pipeline-chunks must agree, got {layers} layers / ({stages} stages x {each}) = {chunks} and "
            f"{explicit['pipeline_chunks']}. Leave one of them out"
        )
    return {"pipeline_chunks": chunks}
