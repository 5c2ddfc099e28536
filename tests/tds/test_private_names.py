"""Private names of DeepSpeed and torch: in one file each, each with a line in the contract; none by accident."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

import tds

TDS = Path(tds.__file__).parent
THEIRS = Path(deepspeed.__file__).parent
CONTRACT = (Path(__file__).parent / "test_deepspeed_contract.py").read_text()
APIS = ("api.py", "torch_api.py")
ELSEWHERE = {
    "host_copies.py": "a process group, made of what torch calls on any",
    "boundary_layers.py": "of the messages between stages, which do without DeepSpeed",
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def _files() -> dict[Path, ast.Module]:
    """Return the syntax of each file of tds."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(TDS.rglob("*.py"))}


def _trees(*names: str) -> Iterator[ast.Module]:
    """Yield the syntax of the files of tds with these names; of all without any."""
    yield from (tree for path, tree in _files().items() if not names or path.name in names)


def _used(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that are read from, or given as a name to, something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("deepspeed", "torch")):
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


PYTHONS = {"_fields", "_initializing", "_current_frames"}
"""Private names of Python's named tuples, of its import system and of its threads."""
DECLARED = {"_input_grad", "_input_type", "_input_pipe_partitioned", "_megatron_batch_fn", "_param_info"}
"""Attributes that a program sets on its own module, and that tds sets on parameters."""


def _touched(*names: str) -> set[str]:
    """Return the private names that are used in files of tds and are not tds's own."""
    return {name for tree in _trees(*names) for name in _used(tree) if _is_private(name)} - _own() - PYTHONS - DECLARED


@functools.cache
def _own() -> set[str]:
    """Return the names that tds defines and that are not DeepSpeed's as well."""
    return {name for tree in _trees() for name in _defined(tree)} - _overridden()


def _overridden() -> set[str]:
    """Return the private methods of DeepSpeed's classes that ours have, too."""
    nodes = [node for tree in _trees("api.py") for node in ast.walk(tree)]
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and _is_private(node.name)}


def test_one_file_imports_deepspeed_and_two_know_what_is_private_there_and_in_torch() -> None:
    for path, tree in _files().items():
        if path.name in APIS or path.name in ELSEWHERE:
            continue
        imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in imported if name.partition(".")[0] == "deepspeed"], path
        assert not [name for name in imported if name.startswith("torch._C")], path
        assert not _touched(path.name) and not {*_defined(tree)} & _overridden(), path


def test_each_private_name_of_torch_has_a_line_in_the_contract() -> None:
    touched = _touched("torch_api.py")
    named = {name for tree in _trees("host_copies.py") for name in _used(tree) if _is_private(name)}
    touched |= {name for name in named if hasattr(dist.ProcessGroup, name) or hasattr(dist.Work, name)}
    assert {"_device_types", "_set_pg_timeout", "_swap_tensor_impl", "_register_backend"} <= touched
    missing = [name for name in sorted(touched) if not re.search(rf"\b{name}\b", CONTRACT)]
    assert not missing, " ".join(missing)


def test_each_private_name_of_deepspeed_has_a_line_in_the_contract() -> None:
    known = set(re.findall(r"\b_[a-zA-Z]\w*", "\n".join(p.read_text(errors="ignore") for p in THEIRS.rglob("*.py"))))
    touched = _touched() & known
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
