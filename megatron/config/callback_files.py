"""Values of ``--callback``: FILE.py:Class. The checks read the file without running it, so they need no torch."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class CallbackSpec(NamedTuple):
    """One value of ``--callback``; ``class_name`` is "" if the value has no colon."""

    path: str
    class_name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.class_name}"


def parse_callbacks(text: str | None) -> list[CallbackSpec]:
    """Split the text of ``--callback``, words as a shell would quote them, into its values.

    Raises:
        ValueError: a quotation mark is not closed.
    """
    specs = []
    for word in shlex.split(text or ""):
        path, colon, class_name = word.rpartition(":")
        specs.append(CallbackSpec(path, class_name) if colon else CallbackSpec(word, ""))
    return specs


def callback_problems(text: str | None) -> Iterator[str]:
    """Yield an error message for each value whose file or class does not exist, and for repeated values."""
    try:
        specs = parse_callbacks(text)
    except ValueError as error:
        yield f"--callback must be FILE.py:Class, got {text}: {error}. Correct the quotation marks"
        return
    for idx, spec in enumerate(specs):
        if spec in specs[:idx]:
            yield f"--callback must name each class once, got {spec} twice. Remove one of them"
        elif not spec.path.endswith(".py") or (spec.class_name and not spec.class_name.isidentifier()):
            yield f"--callback must be FILE.py:Class, got {spec.path}{':' if spec.class_name else ''}{spec.class_name}"
        else:
            yield from _file_problems(spec)


def _file_problems(spec: CallbackSpec) -> Iterator[str]:
    try:
        tree = ast.parse(Path(spec.path).read_bytes(), spec.path)
    except OSError as error:
        yield (
            f"--callback must name a Python file, got {spec.path}: {error.strerror} (looked in {Path.cwd()}). "
            "Correct the path"
        )
    except (SyntaxError, ValueError) as error:  # ValueError: a NUL byte
        line = getattr(error, "lineno", None)
        place = f"{spec.path}:{line}" if line else spec.path
        yield f"--callback {spec.path} is not valid Python: {place}: {getattr(error, 'msg', error)}. Correct the file"
    else:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        listed = f"its classes are {', '.join(classes)}" if classes else "it defines none"
        if not spec.class_name:
            yield f"--callback must be FILE.py:Class, got {spec.path} without a class; {listed}"
        elif spec.class_name not in classes and not _may_bind(tree, spec.class_name):
            yield f"--callback must name a class of the file, got {spec}; {listed}. Correct the name"


def _may_bind(tree: ast.Module, name: str) -> bool:
    """Return True if the file may define ``name`` other than by a class statement at its top level."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
    return name in names or "*" in names
