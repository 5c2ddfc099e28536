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

TDS_DIR = Path(tds.__file__).parent
DEEPSPEED_DIR = Path(deepspeed.__file__).parent
CONTRACT = (Path(__file__).parent / "test_deepspeed_contract.py").read_text()
API_FILES = ("api.py", "torch_api.py")
EXEMPT_FILES = {
    "host_copies.py": "a process group, made of what torch calls on any",
    "boundary_layers.py": "of the messages between stages, which do without DeepSpeed",
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def _parsed_files() -> dict[Path, ast.Module]:
    """Return the syntax of each file of tds."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(TDS_DIR.rglob("*.py"))}


def _trees(*names: str) -> Iterator[ast.Module]:
    """Yield the syntax of the files of tds with these names; of all without any."""
    yield from (tree for path, tree in _parsed_files().items() if not names or path.name in names)


def _used_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that are read from, or given as a name to, something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("deepspeed", "torch")):
            yield from (alias.name for alias in node.names)


def _defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that tds itself defines: functions, classes, what is assigned on self or in a class."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


PYTHON_NAMES = {"_fields", "_initializing", "_current_frames"}
"""Private names of Python's named tuples, of its import system and of its threads."""
DECLARED_ATTRIBUTES = {"_input_grad", "_input_type", "_input_pipe_partitioned", "_megatron_batch_fn", "_param_info"}
"""Attributes that a program sets on its own module, and that tds sets on parameters."""


def _private_names_used(*names: str) -> set[str]:
    """Return the private names that are used in files of tds and are not tds's own."""
    return (
        {name for tree in _trees(*names) for name in _used_names(tree) if _is_private(name)}
        - _tds_names()
        - PYTHON_NAMES
        - DECLARED_ATTRIBUTES
    )


@functools.cache
def _tds_names() -> set[str]:
    """Return the names that tds defines and that are not DeepSpeed's as well."""
    return {name for tree in _trees() for name in _defined_names(tree)} - _overridden_names()


def _overridden_names() -> set[str]:
    """Return the private methods of DeepSpeed's classes that ours have, too."""
    nodes = [node for tree in _trees("api.py") for node in ast.walk(tree)]
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and _is_private(node.name)}


def test_only_api_files_use_deepspeed_and_private_names() -> None:
    for path, tree in _parsed_files().items():
        if path.name in API_FILES or path.name in EXEMPT_FILES:
            continue
        imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in imported if name.partition(".")[0] == "deepspeed"], path
        assert not [name for name in imported if name.startswith("torch._C")], path
        assert not _private_names_used(path.name) and not {*_defined_names(tree)} & _overridden_names(), path


def test_private_torch_names_are_covered_by_contract() -> None:
    used = _private_names_used("torch_api.py")
    host_copies_names = {name for tree in _trees("host_copies.py") for name in _used_names(tree) if _is_private(name)}
    used |= {name for name in host_copies_names if hasattr(dist.ProcessGroup, name) or hasattr(dist.Work, name)}
    assert {"_device_types", "_set_pg_timeout", "_swap_tensor_impl", "_register_backend"} <= used
    missing = [name for name in sorted(used) if not re.search(rf"\b{name}\b", CONTRACT)]
    assert not missing, " ".join(missing)


def test_private_deepspeed_names_are_covered_by_contract() -> None:
    known = set(
        re.findall(r"\b_[a-zA-Z]\w*", "\n".join(p.read_text(errors="ignore") for p in DEEPSPEED_DIR.rglob("*.py")))
    )
    used = _private_names_used() & known
    assert {"_config", "_grid", "_take_model_step", "_layer_specs"} <= used
    missing = [name for name in sorted(used) if not re.search(rf"\b{name}\b", CONTRACT)]
    assert not missing, " ".join(missing)


def test_overridden_private_names_are_covered_by_contract() -> None:
    """And nothing else is overridden: an attribute of ours by a name that DeepSpeed's class uses would break it."""
    for tds_class, deepspeed_class in (
        (tds.PipelineEngine, DeepSpeedEngine),
        (tds.PipelineModule, deepspeed.PipelineModule),
    ):
        source = "".join(
            inspect.getsource(base) for base in deepspeed_class.__mro__ if base.__module__.startswith("deepspeed")
        )
        trees = [
            ast.parse(textwrap.dedent(inspect.getsource(c))) for c in tds_class.__mro__ if c.__module__[:4] == "tds."
        ]
        private_names = {name for tree in trees for name in _defined_names(tree) if _is_private(name)}
        shared = {name for name in private_names if re.search(rf"\b{name}\b", source)}
        missing = [name for name in sorted(shared) if not re.search(rf"\b{name}\b", CONTRACT)]
        assert not missing, (tds_class, missing)
