"""Names and signatures of a package that cannot be imported, read from its Python files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def used_attributes(source: Path, prefix: str) -> set[str]:
    """Return every ``name`` of the expressions ``prefix.name`` in a file; ``prefix`` may have dots."""
    nodes = ast.walk(ast.parse(source.read_text(encoding="utf-8")))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == prefix}


def defined_names(module: Path) -> dict[str, ast.AST]:
    """Map each name that a module defines or imports at its top level to its definition.

    Args:
        module: a file, or a package's folder. ``from .x import *`` is followed within the package.
    """
    file = module / "__init__.py" if module.is_dir() else module
    names: dict[str, ast.AST] = {}
    for node in _top_level(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update({target.id: node for target in targets if isinstance(target, ast.Name)})
        elif isinstance(node, ast.Import):
            names.update({(alias.asname or alias.name).partition(".")[0]: node for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            names.update(_imported_names(file, node))
    return names


def _top_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield statements of the module and of its top-level ``if`` and ``try`` blocks."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop(0)
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            pending += [*node.body, *node.orelse, *getattr(node, "finalbody", [])]


def _imported_names(file: Path, node: ast.ImportFrom) -> dict[str, ast.AST]:
    source = file.parent / (node.module or "").replace(".", "/") if node.level == 1 else None
    if source is not None and not source.is_dir():
        source = source.with_suffix(".py")
    in_package = defined_names(source) if source is not None and source.exists() and source != file.parent else {}
    if any(alias.name == "*" for alias in node.names):
        exported = _exported(in_package)
        return {name: value for name, value in in_package.items() if name in exported}
    return {alias.asname or alias.name: in_package.get(alias.name, node) for alias in node.names}


def _exported(names: dict[str, ast.AST]) -> set[str]:
    """Return the names that ``import *`` takes."""
    listed = names.get("__all__")
    if isinstance(listed, ast.Assign):
        return set(ast.literal_eval(listed.value))
    return {name for name in names if not name.startswith("_")}


def accepts(definition: ast.AST, num_args: int) -> bool:
    """Return True if a function accepts ``num_args`` positional arguments and needs no others."""
    if not isinstance(definition, ast.FunctionDef):
        return False
    args = definition.args
    most = len(args.posonlyargs) + len(args.args)
    needs_keyword = any(default is None for default in args.kw_defaults)
    return most - len(args.defaults) <= num_args and (num_args <= most or bool(args.vararg)) and not needs_keyword


def calls(source: Path, prefix: str) -> set[tuple[str, int]]:
    """Return (name, number of positional arguments) of every call ``prefix.name(...)`` in a file."""
    nodes = ast.walk(ast.parse(source.read_text(encoding="utf-8")))
    return {
        (node.func.attr, len(node.args))
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == prefix
    }
