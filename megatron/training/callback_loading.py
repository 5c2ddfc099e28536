"""Callbacks of ``--callback``: import the user's files and construct the classes."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from megatron import log
from megatron.config.callback_files import CallbackSpec, parse_callbacks
from megatron.errors import ConfigError
from megatron.training.trainer import HOOKS, Callback


def load_callbacks(text: str | None) -> list[Callback]:
    """Construct the callbacks of ``--callback`` in the order of its values. Each file is imported once.

    Args:
        text: value of the flag, which has passed ``callback_problems``.

    Raises:
        ConfigError: a file raises an error or exits, a class is not a ``Callback`` that can be constructed without
            arguments, or a hook cannot be called with its arguments.
    """
    modules: dict[Path, ModuleType] = {}
    callbacks = []
    for spec in parse_callbacks(text):
        path = Path(spec.path).resolve()
        if path not in modules:
            modules[path] = _import_file(spec, path, f"megatron_callback_file_{len(modules)}_{path.stem}")
        callbacks.append(_construct(spec, modules[path]))
    return callbacks


def _import_file(spec: CallbackSpec, path: Path, name: str) -> ModuleType:
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None  # the path ends in .py
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look up a class's module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # SystemExit: a script without a check of __name__
        del sys.modules[name]
        raise ConfigError(
            f"--callback {spec}: importing the file failed: {_describe(error, path)}. Correct the file, or put the "
            "folder of a module that it imports on PYTHONPATH"
        ) from error
    return module


def _construct(spec: CallbackSpec, module: ModuleType) -> Callback:
    callback_class = getattr(module, spec.class_name, None)
    if callback_class is None:
        raise ConfigError(f"--callback must name a class of the file, got {spec}, which the file does not define")
    if not (isinstance(callback_class, type) and issubclass(callback_class, Callback)):
        noun = "class without this base" if isinstance(callback_class, type) else type(callback_class).__name__
        raise ConfigError(
            f"--callback must name a subclass of megatron.training.Callback, got {spec}, a {noun}. Write "
            f"class {spec.class_name}(Callback) after: from megatron.training import Callback"
        )
    try:
        callback = callback_class()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"--callback {spec}: {spec.class_name}() failed: {_describe(error, Path(module.__file__ or ''))}. The "
            "constructor is called without arguments"
        ) from error
    _check_hooks(spec, callback)
    if os.environ.get("RANK", "0") == "0":
        _warn_of_unknown_hooks(spec, callback)
    return callback


def _check_hooks(spec: CallbackSpec, callback: Callback) -> None:
    """Raise ConfigError if a hook cannot be called with its arguments."""
    for hook in HOOKS:
        names = [name for name in inspect.signature(getattr(Callback, hook)).parameters if name != "self"]
        try:
            inspect.signature(getattr(callback, hook)).bind(*names)
        except TypeError as error:
            raise ConfigError(
                f"--callback {spec}: {hook} must accept the arguments ({', '.join(names)}), got an error: {error}. "
                "Correct its parameters"
            ) from error
        except ValueError:  # a built-in function without a signature
            continue


def _warn_of_unknown_hooks(spec: CallbackSpec, callback: Callback) -> None:
    """Warn of methods whose names begin as hooks do, such as on_step_ends."""
    for name in dir(type(callback)):
        if name.startswith("on_") and not hasattr(Callback, name) and callable(getattr(type(callback), name)):
            close = difflib.get_close_matches(name, HOOKS, 1)
            hint = f". Did you mean {close[0]}?" if close else f"; the hooks are {', '.join(HOOKS)}"
            log.warning(f"--callback {spec}: {name} is not a hook, so the trainer does not call it{hint}")


def _describe(error: BaseException, path: Path) -> str:
    """Describe ``error`` with the last line of ``path`` that it passed through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f"{type(error).__name__}: {error}" + (f" ({path.name}:{lines[-1]})" if lines else "")
