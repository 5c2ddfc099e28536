"""Every module of DeepSpeed under its name in tds, and DeepSpeed as it was."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest

import tds
from tds.deepspeed.alias import add_aliases, deepspeed_name

FORWARDING_MODULES = ["tds.pipe", "tds.runtime", "tds.runtime.pipe", "tds.runtime.pipe.engine"]
LATE_MODULES = ["moe.layer", "ops.lion", "checkpoint.ds_to_universal", "utils.zero_to_fp32", "sequence.layer", "linear"]
"""Some that ``import deepspeed`` leaves alone, or most of it."""


def _run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_imports_by_tds_names_return_deepspeed_modules() -> None:
    """In a process of its own: what is loaded when decides much of this. Nothing is printed or compiled."""
    output = _run_python(
        f"""
import importlib, sys
import deepspeed

def state():
    names = [n for n in sys.modules if n.split(".")[0] == "deepspeed"]
    return {{n: (sys.modules[n], vars(sys.modules[n]).get("__spec__"), sys.modules[n].__name__,
                vars(sys.modules[n]).get("__loader__"), sys.modules[n].__package__,
                vars(sys.modules[n]).get("__path__"), dict(vars(sys.modules[n]))) for n in names}}

before = state()
import tds.ops.adam
import tds.utils.tensor_fragment, tds.utils.z3_leaf_module
from tds.runtime.zero import Init
from tds.pipe import TiedLayerSpec
from tds.runtime.pipe import ProcessTopology, schedule, engine
from tds.runtime.pipe.topology import PipeDataParallelTopology
assert engine is tds.runtime.pipe.engine and engine.PipelineEngine is tds.PipelineEngine
assert engine.p2p is deepspeed.runtime.pipe.engine.p2p
after = state()
for name, old in before.items():
    new = after[name]
    assert all(a is b for a, b in zip(old[:5], new[:5])) and old[5] is new[5], name
    assert all(new[6].get(key) is value for key, value in old[6].items() if not key.startswith("__")), name
import tds.compile.custom_ops.all_to_all  # a function and a module, both of a package that was not loaded
assert callable(deepspeed.compile.custom_ops.all_to_all)
assert sys.modules["tds.compile.custom_ops.all_to_all"] is sys.modules["deepspeed.compile.custom_ops.all_to_all"]
for name in {LATE_MODULES!r}:
    ours, theirs = importlib.import_module("tds." + name), importlib.import_module("deepspeed." + name)
    assert ours is theirs and theirs.__spec__.name == theirs.__name__ == "deepspeed." + name, name
    assert sys.modules["tds." + name] is theirs
files = {{}}
for name, module in sys.modules.items():
    if name.split(".")[0] in ("tds", "deepspeed") and getattr(module, "__file__", None):
        assert files.setdefault(module.__file__, module) is module, name
assert not [name for name in sys.modules if name.split(".")[0] == "megatron"]
assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False
assert "setuptools" not in sys.modules  # DeepSpeed imports it when it asks what can be compiled
"""
    )
    assert output == ""


def test_loaded_deepspeed_modules_are_aliased_except_forwarding_ones() -> None:
    for name in FORWARDING_MODULES:
        importlib.import_module(name)
    add_aliases()
    loaded = [name for name in sys.modules if name.startswith("deepspeed.")]
    assert len(loaded) > 300
    non_aliased = [
        name for name in loaded if sys.modules["tds" + name.removeprefix("deepspeed")] is not sys.modules[name]
    ]
    assert sorted(deepspeed_name(name) for name in FORWARDING_MODULES) == sorted(non_aliased)


def test_tds_files_hide_no_deepspeed_names() -> None:
    tds_names = {info.name for info in pkgutil.iter_modules(tds.__path__)}
    deepspeed_names = {info.name for info in pkgutil.iter_modules(deepspeed.__path__)} | set(vars(deepspeed))
    assert tds_names & deepspeed_names == {"pipe", "runtime"}
    assert {info.name for info in pkgutil.iter_modules(tds.runtime.__path__)} == {"pipe"}
    assert {info.name for info in pkgutil.iter_modules(tds.runtime.pipe.__path__)} == {"engine"}


@pytest.mark.parametrize("name", FORWARDING_MODULES)
def test_forwarding_module_replaces_only_pipeline_names(name: str) -> None:
    module, deepspeed_module = importlib.import_module(name), importlib.import_module(deepspeed_name(name))
    assert module is not deepspeed_module and module.__name__ == name and module.__spec__.name == name
    for public_name in [attribute for attribute in dir(deepspeed_module) if not attribute.startswith("__")]:
        is_replaced = (
            public_name in {"PipelineModule", "PipelineEngine"} or f"{name}.{public_name}" in FORWARDING_MODULES
        )
        assert (getattr(module, public_name) is getattr(deepspeed_module, public_name)) != is_replaced, public_name
    assert {attribute for attribute in dir(module) if not attribute.startswith("_")} >= {
        e for e in dir(deepspeed_module) if e[0] != "_"
    }


def test_stock_pipe_module_is_not_replaced() -> None:
    assert tds.runtime.pipe.module is deepspeed.runtime.pipe.module
    assert issubclass(tds.PipelineModule, tds.runtime.pipe.module.PipelineModule)


def test_attributes_set_on_tds_are_set_on_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``deepspeed.HAS_TRITON = False`` switches kernels off, so ``tds.HAS_TRITON = False`` must."""
    monkeypatch.setattr(tds, "HAS_TRITON", "no", raising=False)
    assert deepspeed.HAS_TRITON == "no" == tds.HAS_TRITON
    monkeypatch.setattr(deepspeed, "dist", "later")
    assert tds.dist == "later"
    stock = deepspeed.PipelineEngine
    monkeypatch.setattr(tds, "PipelineEngine", int)
    assert deepspeed.PipelineEngine is stock and tds.PipelineEngine is int
    monkeypatch.setattr(tds.runtime.pipe.engine, "LOG_STAGE", 5)
    assert deepspeed.runtime.pipe.engine.LOG_STAGE == 5
    tds.made_up = 1
    del tds.made_up
    assert not hasattr(deepspeed, "made_up") and not hasattr(tds, "made_up")


def test_import_star_matches_deepspeed() -> None:
    tds_names: dict[str, Any] = {}
    deepspeed_names: dict[str, Any] = {}
    exec("from tds import *", tds_names)
    exec("from deepspeed import *", deepspeed_names)
    assert set(tds_names) >= set(deepspeed_names) and tds_names["PipelineModule"] is tds.PipelineModule
    assert tds_names["DeepSpeedConfig"] is deepspeed_names["DeepSpeedConfig"]


def test_modules_and_classes_can_be_reloaded_pickled_and_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, length = tds.PipelineEngine, len(sys.meta_path)
    for name in ("tds", *FORWARDING_MODULES):
        module = sys.modules[name]
        assert importlib.reload(module) is module
    assert tds.PipelineEngine is engine and len(sys.meta_path) == length and tds.zero is deepspeed.zero
    constants = importlib.import_module("tds.runtime.constants")
    assert importlib.reload(constants) is sys.modules["deepspeed.runtime.constants"] is constants
    for obj in (tds.PipelineModule, tds.runtime.pipe.ProcessTopology, tds.pipe.LayerSpec, tds.initialize):
        assert pickle.loads(pickle.dumps(obj)) is obj is copy.deepcopy(obj)


@pytest.mark.parametrize("name", ["tds.nothing", "tds.ops.nothing", "tds.pipe.nothing", "tds.runtime.engine.nothing"])
def test_missing_deepspeed_modules_raise_not_found(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=name.rpartition(".")[0]):
        importlib.import_module(name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(deepspeed_name(name))


def test_find_spec_does_not_load_module() -> None:
    spec = importlib.util.find_spec("tds.compression.helper")
    assert spec is not None and Path(str(spec.origin)).parts[-3:] == ("deepspeed", "compression", "helper.py")
