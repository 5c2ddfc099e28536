"""Repeat the proof of a finished run, and compare each item with proof.json."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.arguments import parse
from megatron.config import Config
from megatron.errors import ConfigError
from megatron.models.registry import FAMILIES
from megatron.training import global_vars
from megatron.training.mock_data import random_data
from megatron.training.plan_checks import BUILTIN_PROGRAMS
from megatron.training.proof.check_result import NOT_CHECKED, CheckResult
from megatron.training.proof.prove_only import check_now
from megatron.training.proof.record import FILE_NAME, FORMAT, code_proof, data_proof, tokenizer_proof
from megatron.training.run_record import git_commit, package_versions
from megatron.training.vocabulary import with_tokenizer

EQUAL, DIFFERENT, NOT_REPEATED, NONE = "equal", "different", "not repeated", "none"
"""States of an item; ``NONE``: the run has not recorded it."""


@dataclass(frozen=True)
class Item:
    """The comparison of one item in proof.json.

    Args:
        state: ``EQUAL``, ``DIFFERENT``, ``NOT_REPEATED`` or ``NONE``.
        text: values, or reason.
    """

    name: str
    state: str
    text: str


_FORM: dict[str, dict[str, type]] = {
    "versions": {},
    "code": {},
    "tokenizer": {},
    "data": {},
    "layout_check": {"state": str},
    "run": {"family": str, "script": str, "ranks": int, "samples": int},
}
"""Sections of proof.json, and the entries that are needed to repeat them."""


def read_proof(run_dir: Path) -> dict[str, Any]:
    """Read proof.json.

    Raises:
        ConfigError: the run has none, or it is damaged.
    """
    path = run_dir / FILE_NAME
    try:
        proof = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run_dir} must be the folder of a finished run with {FILE_NAME}, which a run writes at its end: {error}"
        ) from None
    if problem := _find_damage(proof):
        raise ConfigError(
            f"{path} is damaged, or another version wrote it: {problem}. Restore the file that the run wrote"
        )
    return proof  # type: ignore[no-any-return]


def _find_damage(proof: Any) -> str:
    """Describe the first section or entry that is missing or of another type; "" if there is none."""
    if not isinstance(proof, dict):
        return f"it must contain an object, got {type(proof).__name__}"
    if proof.get("format") != FORMAT:
        return f"format must be {FORMAT}, got {proof.get('format')}"
    for section, entries in _FORM.items():
        values = proof.get(section)
        if not isinstance(values, dict):
            return f"{section} must be an object, got {values}"
        for name, value_type in entries.items():
            if not isinstance(values.get(name), value_type):
                return f"{section}.{name} must be of type {value_type.__name__}, got {values.get(name)}"
    run = proof["run"]
    if run["ranks"] < 1 or run["samples"] < 0:
        return f"run.ranks must be at least 1 and run.samples at least 0, got {run['ranks']} and {run['samples']}"
    if not isinstance(proof["layout_check"].get("gradient", 0.0), int | float):
        return f"layout_check.gradient must be a number, got {proof['layout_check']['gradient']}"
    return ""


def repeat_proof(run_dir: Path, *, has_layout_check: bool = True) -> Iterator[Item]:
    """Repeat each item in proof.json on this machine and yield the comparison.

    Args:
        has_layout_check: also repeat the layout check, which starts processes.

    Raises:
        ConfigError: the run has no proof.json, or its settings are not valid here.
    """
    proof = read_proof(run_dir)
    run = proof["run"]
    yield from _compare_values("version of ", proof["versions"], package_versions())
    yield from _compare_values("code: ", proof["code"], code_proof(git_commit(), run["script"]))
    is_built_in = Path(run["script"]).name in BUILTIN_PROGRAMS
    if is_built_in and run["family"] not in FAMILIES:
        raise ConfigError(
            f"{run_dir / FILE_NAME}: run.family must be one of {', '.join(FAMILIES)}, got {run['family']}. Restore the "
            "file that the run wrote"
        )
    config = _parse_config(run_dir, run)
    tokenizer, config = with_tokenizer(config)
    yield _compare("tokenizer", proof["tokenizer"], tokenizer_proof(tokenizer), "probe_sha256")
    if not is_built_in:
        reason = f"the data and the model belong to {run['script']}"
        yield Item("data order", NOT_REPEATED, reason)
        yield Item("layout check", NOT_REPEATED, f"{reason}; repeat it with --prove-only")
        return
    program = importlib.import_module(FAMILIES[run["family"]].program.removesuffix(".py").replace("/", "."))
    yield _compare("data order", proof["data"], _repeat_data(proof, config, tokenizer, program), "samples_sha256")
    if has_layout_check:
        recorded = CheckResult.from_dict(proof["layout_check"])
        yield _compare_checks(recorded, config, run["ranks"], program)


def _compare_values(prefix: str, recorded: Mapping[str, str], current: Mapping[str, str]) -> Iterator[Item]:
    for name, value in recorded.items():
        now = current.get(name, "none")
        yield Item(
            f"{prefix}{name}", EQUAL if now == value else DIFFERENT, value if now == value else f"{value}, {now}"
        )


def _compare(name: str, recorded: Mapping[str, Any], current: Mapping[str, Any], key: str) -> Item:
    """Compare the hash ``key`` and all other values in an item."""
    if "problem" in recorded:
        return Item(name, NONE, recorded["problem"])
    if "problem" in current:
        return Item(name, NOT_REPEATED, current["problem"])
    if key not in recorded:
        return Item(name, NOT_REPEATED, f"{FILE_NAME} has neither {key} nor problem")
    differing = [field for field in recorded if recorded[field] != current.get(field)]
    if not differing:
        return Item(name, EQUAL, str(recorded[key])[:16])
    pairs = (f"{field} {recorded[field]} and {current.get(field)}" for field in differing)
    return Item(name, DIFFERENT, "; ".join(pairs))


def _parse_config(run_dir: Path, run: Mapping[str, Any]) -> Config:
    """Parse the run's settings."""
    family = run["family"]
    is_decoder = FAMILIES[family].model_type == "decoder" if family in FAMILIES else False
    argv = ["--config", str(run_dir / "config.json")]
    return parse(argv, world_size=run["ranks"], env={}, family=family, accepts_model=is_decoder)


def _repeat_data(proof: Mapping[str, Any], config: Config, tokenizer: Any, program: Any) -> dict[str, Any]:
    """Open the training data again and hash it."""
    global_vars.set_current(config, tokenizer, None)
    try:
        if config.data.is_mock:
            dataset = random_data(config, config.run.seed, tokenizer)
        else:
            dataset, _, _ = program.train_valid_test_datasets_provider([1, 0, 0])
    except (OSError, ValueError) as error:
        return {"problem": f"the data cannot be opened: {error}"}
    return data_proof(dataset, proof["run"]["samples"])


def _compare_checks(recorded: CheckResult, config: Config, world_size: int, program: Any) -> Item:
    """Repeat the layout check and compare it with the ``recorded`` one."""
    if recorded.state == NOT_CHECKED:
        return Item("layout check", NONE, recorded.reason)
    providers = (program.train_valid_test_datasets_provider, program.model_provider, program.forward_step)
    result = check_now(config, world_size, *providers)
    if result.state == NOT_CHECKED:
        return Item("layout check", NOT_REPEATED, result.reason)
    is_equal = result.state == recorded.state
    text = f"{recorded.state}, worst gradient {recorded.gradient:.1e}"
    return Item(
        "layout check",
        EQUAL if is_equal else DIFFERENT,
        f"{text}; now {result.state}, {result.gradient:.1e}{f' ({result.reason})' if result.reason else ''}",
    )
