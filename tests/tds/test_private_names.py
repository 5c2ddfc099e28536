"""Every private name of DeepSpeed that tds touches has its line in the contract; none is taken by accident."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine

import tds

TDS = Path(tds.__file__).parent
THEIRS = Path(deepspeed.__file__).parent
CONTRACT = (Path(__file__).parent / "test_deepspeed_contract.py").read_text()


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _trees() -> Iterator[ast.Module]:
    for path in sorted(TDS.rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


def _used(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that are read from, or given as a name to, something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepspeed"):
            yield from (alias.name for alias in node.names)


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that tds itself defines: functions, classes, what is assigned on self or in a class."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


PYTHONS = {"_fields", "_initializing", "_version"}
"""Private names of Python's named tuples and of its import system, and of torch's count of changes in place."""


def test_each_private_name_of_deepspeed_has_a_line_in_the_contract() -> None:
    known = set(re.findall(r"\b_[a-zA-Z]\w*", "\n".join(p.read_text(errors="ignore") for p in THEIRS.rglob("*.py"))))
    defined = {name for tree in _trees() for name in _defined(tree)}
    touched = {name for tree in _trees() for name in _used(tree) if _is_private(name)} & known - defined - PYTHONS
    assert {"_config", "_grid", "_take_model_step", "_layer_specs"} <= touched
    missing = [name for name in sorted(touched) if not re.search(rf"\b{name}\b", CONTRACT)]
    assert not missing, " ".join(missing)


def test_what_our_classes_override_of_deepspeeds_privates_has_a_line_too() -> None:
    """And nothing else is overridden: an attribute of ours by a name that DeepSpeed's class uses would break it."""
    for ours, theirs in ((tds.PipelineEngine, DeepSpeedEngine), (tds.PipelineModule, deepspeed.PipelineModule)):
        source = "".join(inspect.getsource(each) for each in theirs.__mro__ if each.__module__.startswith("deepspeed"))
        own = [ast.parse(textwrap.dedent(inspect.getsource(c))) for c in ours.__mro__ if c.__module__[:4] == "tds."]
        set_here = {name for tree in own for name in _defined(tree) if _is_private(name)}
        shared = {name for name in set_here if re.search(rf"\b{name}\b", source)}
        missing = [name for name in sorted(shared) if not re.search(rf"\b{name}\b", CONTRACT)]
        assert not missing, (ours, missing)
