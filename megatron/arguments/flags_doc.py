"""``python -m megatron.arguments.flags_doc > docs/flags.md``: the table of all flags, from the fields and the lists."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from megatron.arguments import deepspeed_keys
from megatron.arguments.flag_row import NEUTRAL, REFUSED
from megatron.arguments.flag_values import all_options, takes
from megatron.arguments.megatron_flags import CPM_FLAGS, ROWS
from megatron.config.family import ModelFamily
from megatron.config.option import Option
from megatron.models.registry import FAMILIES

HEAD = """# Flags

Made by `python -m megatron.arguments.flags_doc > docs/flags.md`; do not edit.

A value comes from its flag, else from the file of `--config`, else from the JSON of `--deepspeed_config`, else from the
flags in the environment variable MEGATRON_DEFAULTS, else from the script (`pretrain(args_defaults=...)`;
pretrain_t5.py: `--activation relu` and `--layernorm-epsilon 1e-6`), else from the family (LLaMA: `--activation
gated-silu`, an untied head, no dropout; MPT: no dropout), else it is the default. pretrain_gpt.py and pretrain_bert.py
have Megatron's defaults ([migration.md](migration.md#programs)). `--model` sets the architecture for all sources weaker
than its own ([models.md](models.md#one-decoder)). A flag that is given and a JSON value that differ are
an error, but for the optimizer's numbers, which the flags give, and the loss scale, which the JSON gives; "auto" in the
JSON means the flag or the default. The last of a repeated flag holds. Flags are not abbreviated. Every mistake of a
command line is reported at once, with exit code 2; a flag that could not act is an error or, where scripts pass it by
habit, a note at the start.

Run scripts use two variables: MEGATRON_DEFAULTS holds their recipe, written as flags, and MEGATRON_VARIABLES holds
`flag=NAME` for each flag that a variable of theirs sets, so that messages name both.
"""

KINDS = """
* **honoured**: sets the field that is named.
* **alias**: another name of an honoured flag.
* **neutral**: accepted; it asks for what holds anyway, or only tunes. The start table names all of them in one row;
  `--strict-flags` refuses them.
* **converted**: sets the fields that are named, exactly.
* **refused**: it would change the numbers and cannot be done; an error that says what to use instead. So is a flag of
  one model in a run of another.
"""

JSON_HEAD = """
A key acts with and without a pipeline unless its row says otherwise. A neutral key is accepted and named in the start
table; a section that is refused is accepted where it is switched off, a scheduler where all its params are "auto".
Unknown keys and wrong kinds of values are errors
with file, line and column; "auto" may stand for every number and switch, and means "as the flags say" (but for
pipeline.schedule, where it is a schedule).
"""

SAID = {
    "fp16.enabled": "as `--fp16`",
    "bf16.enabled": "as `--bf16`",
    "zero_optimization.stage": "0 to 3; as `--zero-stage`",
    "zero_optimization.reduce_bucket_size": "as `--reduce-bucket-size`; 0: by itself",
    "zero_optimization.allgather_bucket_size": "as `--allgather-bucket-size`; 0: by itself",
    "zero_optimization.stage3_prefetch_bucket_size": "as `--stage3-prefetch-bucket-size`",
    "zero_optimization.prefetch_bucket_size": "its name within DeepSpeed",
    "zero_optimization.offload_optimizer": "the rows below",
    "zero_optimization.offload_optimizer.device": "cpu: as `--offload-optimizer`; disks (nvme) are refused",
    "zero_optimization.offload_optimizer.pin_memory": "false: as `--no-pin-memory`",
    "zero_optimization.offload_param": "the rows below",
    "zero_optimization.offload_param.device": "cpu: as `--offload-parameters`; disks (nvme) are refused",
    "zero_optimization.offload_param.pin_memory": "false: as `--no-pin-memory`",
    "optimizer.type": "AdamW, Adam (which DeepSpeed runs as AdamW) or SGD; as `--optimizer`",
    "optimizer.params": "the rows below",
    "optimizer.params.betas": "as `--adam-beta1` and `--adam-beta2`",
}


def classify(flag: str) -> tuple[str, str]:
    """Return the class of ``flag`` and what to know about it.

    Raises:
        KeyError: the flag is in no list.
    """
    for section, option in all_options():
        if flag in option.flags:
            return _honoured(flag, section, option)
    row = ROWS[flag]
    about = row.about
    if row.kind == NEUTRAL and row.holds:
        return row.kind, f"`{' '.join(row.holds)}`: {about}; other values are refused: {row.otherwise}"
    if row.kind != REFUSED and row.fields:
        names = {option.name: option.flag or "/".join(option.constants) for _, option in all_options()}
        about = f"{' '.join(f'`{names[name]}`' for name in row.fields)}: {about}"
    reasons_of = {family.title: family.config.REFUSED for family in FAMILIES.values()}
    others = [f"; {title}: {reasons[flag]}" for title, reasons in reasons_of.items() if flag in reasons]
    return row.kind, about + "".join(others)


def _honoured(flag: str, section: str, option: Option) -> tuple[str, str]:
    if flag in option.aliases:
        return "alias", f"of `{option.flag}`"
    if flag in option.constants:
        return "honoured", f"`{section}.{option.name}` = {option.constants[flag]}"
    return "honoured", f"`{section}.{option.name}`{_elsewhere(section, option)}"


def _elsewhere(section: str, option: Option) -> str:
    """Return in which families ``option`` acts, and what the others are told: first a family of another kind."""
    acting = _acting(section, option)
    others = [family for family in FAMILIES.values() if family not in acting]
    if not others:
        return ""
    kinds = {family.kind for family in acting}
    usual = next(family for family in others if family.kind not in kinds).advice(option)
    advice = [f"; {family.title}: {family.advice(option)}" for family in others if family.advice(option) != usual]
    return f"; in {_names(section, option)} only, elsewhere refused: {usual}{''.join(advice)}"


def _names(section: str, option: Option) -> str:
    """Return the families in which ``option`` acts; nothing where it acts in all."""
    acting = _acting(section, option)
    return ", ".join(family.title for family in acting) if len(acting) < len(FAMILIES) else ""


def _acting(section: str, option: Option) -> list[ModelFamily]:
    """Return the families in which ``option`` acts: the decoders first where it acts in all of them."""
    acting = [family for family in FAMILIES.values() if takes(family.name, section, option)]
    has_all = all(family in acting for family in FAMILIES.values() if family.kind == "decoder")
    return sorted(acting, key=lambda family: has_all and family.kind != "decoder")


def lines() -> Iterator[str]:
    """Yield the lines of docs/flags.md."""
    yield HEAD
    yield "## What can be set\n"
    yield "A flag of some models only names them. `--help` shows the flags that people set, `--help-all` every one.\n"
    yield "| flag | other names | model | value | default | meaning |"
    yield "|---|---|---|---|---|---|"
    for section, option in all_options():
        names = [f"`{flag}`" for flag in option.flags]
        value = "" if option.kind == "bool" else _cell(option.shown_kind)
        model, default = _names(section, option), _cell(option.shown_default)
        yield f"| {names[0]} | {' '.join(names[1:])} | {model} | {value} | {default} | {_cell(option.help)} |"
    yield "\n## Flags of CPM-Pretrain\n" + KINDS
    yield from _rows(list(CPM_FLAGS))
    yield "\n## Other flags of Megatron-LM, Megatron-DeepSpeed and BigScience\n"
    yield from _rows(sorted(flag for flag in _others() if flag not in CPM_FLAGS))
    yield "\n## Keys of DeepSpeed's JSON\n" + JSON_HEAD
    yield "| key | value | what happens |"
    yield "|---|---|---|"
    yield from _json_rows()


def _json_rows() -> Iterator[str]:
    flags = _flags_of_fields()
    inner = {
        f"{name}.{key}": value for name, section in deepspeed_keys.SECTIONS.items() for key, value in section.items()
    }
    read = [name for name in deepspeed_keys.INNER if name.partition(".")[0] in deepspeed_keys.SECTIONS]
    params = {f"{section}.{name}": key for section in read for name, key in deepspeed_keys.INNER[section].items()}
    for name, key in {**deepspeed_keys.VALUES, **inner, **params}.items():
        what = _json_neutral(key) or (f"as `{flags[key.field]}`" if key.field else SAID.get(name, ""))
        yield f"| `{name}` | {_json_value(key)} | {what} |"
    for name, key in deepspeed_keys.PASSED.items():
        yield f"| `{name}` | {key.kind} | handed to DeepSpeed: {key.about} |"
        yield from _inner_rows(name)
    for name, key in deepspeed_keys.NEUTRAL.items():
        yield f"| `{name}` | {_json_value(key)} | {_json_neutral(key)} |"
    for name, reason in deepspeed_keys.REFUSED.items():
        yield f"| `{name}` | | refused: {reason} |"


def _json_value(key: deepspeed_keys.Key) -> str:
    return ", ".join(key.choices) or ", ".join(str(value).lower() for value in key.holds) or key.kind


def _json_neutral(key: deepspeed_keys.Key) -> str:
    """Return what is said of a key that asks for what holds, "" of others."""
    if not key.is_neutral:
        return ""
    return f"neutral: {key.about}" + (f"; other values are refused: {key.otherwise}" if key.holds else "")


def _flags_of_fields() -> dict[str, str]:
    return {option.name: option.flag or "/".join(option.constants) for _, option in all_options()}


def _inner_rows(section: str) -> Iterator[str]:
    flags = _flags_of_fields()
    for name, key in deepspeed_keys.INNER.get(section, {}).items():
        is_idle = section == "pipeline" and name in deepspeed_keys.NOT_READ
        about = f"no effect: {deepspeed_keys.NOT_READ[name]}" if is_idle else key.about
        about = f"as `{flags[key.field]}`" if section == "pipeline" and key.field else about
        yield f"| `{section}.{name}` | {', '.join(key.choices) or key.kind} | {about} |"
        yield from _inner_rows(f"{section}.{name}")


def _others() -> Iterator[str]:
    for _, option in all_options():
        yield from option.aliases
    yield from ROWS


def _rows(flags: list[str]) -> Iterator[str]:
    yield "| flag | class | what to know |"
    yield "|---|---|---|"
    for flag in flags:
        kind, text = classify(flag)
        yield f"| `{flag}` | {kind} | {_cell(text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def text() -> str:
    """Return docs/flags.md."""
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
