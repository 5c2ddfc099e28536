"""Packages that give out names on first use: no file of theirs may have such a name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import megatron
from megatron import mpu

ROOT = Path(__file__).resolve().parents[1]


def find_name_tables(init: Path) -> list[ast.Dict]:
    """Return the tables name -> module of a package's ``__init__``."""
    values = [getattr(node, "value", None) for node in ast.parse(init.read_text(encoding="utf-8")).body]
    return [value for value in values if isinstance(value, ast.Dict)]


def test_lazy_names_differ_from_submodule_names() -> None:
    """Once it is imported, the module would stand where the function is looked for."""
    inits = [path for folder in ("megatron", "tds") for path in (ROOT / folder).rglob("__init__.py")]
    for init in inits:
        submodules = {
            path.stem for path in init.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
        }
        keys = [key for table in find_name_tables(init) for key in table.keys if isinstance(key, ast.Constant)]
        names = {ast.literal_eval(key) for key in keys}
        assert not names & submodules, init
    assert sum(bool(find_name_tables(init)) for init in inits) > 5


def test_lazy_name_is_cached_in_module() -> None:
    assert mpu.vocab_range is vars(mpu)["vocab_range"]


def test_unknown_name_raises_attribute_error() -> None:
    for package in (megatron, mpu):
        with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Nothing'"):
            getattr(package, "Nothing")  # noqa: B009 - mypy would know
