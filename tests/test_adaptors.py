"""Adaptors: applied as one, taken back whole, switched off by the environment, and clear where they do not fit."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from megatron import accelerators
from megatron.accelerators import Adaptor, Patch


class Base:
    def inherited(self) -> str:
        return "base"


class Target(Base):
    @staticmethod
    def fixed() -> str:
        return "fixed"


def function() -> str:
    return "whole"


@pytest.fixture
def module() -> Iterator[Any]:
    """A module to patch, with a function and two classes."""
    patched = types.ModuleType("patched")
    patched.whole, patched.Part, patched.number = function, Target, 3
    sys.modules["patched"] = patched
    yield patched
    del sys.modules["patched"]


def make_patch(name: str, new: Any) -> Patch:
    return Patch(f"patched.{name}", lambda old: new, "a test")


def make_adaptor(package: str = "torch") -> Adaptor:
    """Return an adaptor of a function, a static method and an inherited method."""
    replacements = {
        "whole": lambda: "new",
        "Part.fixed": staticmethod(lambda: "new"),
        "Part.inherited": lambda self: "new",
    }
    return Adaptor(package, "three", tuple(make_patch(name, new) for name, new in replacements.items()))


def call_all(module: Any) -> list[str]:
    return [module.whole(), module.Part.fixed(), module.Part().inherited()]


def test_adaptor_replaces_and_restores_all_attributes(module: Any) -> None:
    before = {name: dict(vars(owner)) for name, owner in {"module": module, "class": Target}.items()}
    applied = accelerators.enable([make_adaptor()], {})
    assert call_all(module) == ["new"] * 3
    applied.disable()
    assert call_all(module) == ["whole", "fixed", "base"]
    assert {"module": dict(vars(module)), "class": dict(vars(Target))} == before
    assert "inherited" not in vars(Target) and isinstance(vars(Target)["fixed"], staticmethod)
    applied.disable()


def test_replacement_is_built_from_original_value(module: Any) -> None:
    doubled = Adaptor("torch", "doubled", (Patch("patched.number", lambda old: 2 * old, "a test"),))
    applied = accelerators.enable([doubled], {})
    assert module.number == 6
    applied.disable()
    assert module.number == 3


@pytest.mark.parametrize(
    ("env", "enabled"),
    [
        ({}, {"torch", "deepspeed", "megatron"}),
        ({"DISABLE_ADAPTOR": "1"}, set()),
        ({"DISABLE_ADAPTOR": "0"}, {"torch", "deepspeed", "megatron"}),
        ({"ENABLE_TORCH_ADAPTOR": "0"}, {"deepspeed", "megatron"}),
        ({"ENABLE_DEEPSPEED_ADAPTOR": "0"}, {"torch", "megatron"}),
        ({"ENABLE_MEGATRON_ADAPTOR": "0", "ENABLE_TORCH_ADAPTOR": "1"}, {"torch", "deepspeed"}),
    ],
    ids=lambda value: "-".join(value) or "none" if isinstance(value, dict) else "on",
)
def test_environment_disables_adaptors(module: Any, env: dict[str, str], enabled: set[str]) -> None:
    adaptors = [
        Adaptor(package, package, (make_patch(f"Part.{package}", "new"),))
        for package in accelerators.PARTS
        if not setattr(Target, package, "")
    ]
    applied = accelerators.enable(adaptors, env)
    assert {package for package in accelerators.PARTS if getattr(Target, package) == "new"} == enabled
    assert {row[0].partition(":")[0] for row in accelerators.adaptor_rows(adaptors, env) if row[1] == "on"} == enabled
    applied.disable()
    for package in accelerators.PARTS:
        delattr(Target, package)


@pytest.mark.parametrize("missing", ["patched.gone", "patched.Part.gone", "not_there.whole", "patched.Gone.whole"])
def test_missing_target_raises_and_applies_no_patch(module: Any, missing: str) -> None:
    invalid = Adaptor("deepspeed", "wrong", (Patch(missing, lambda old: "new", "a test"),))
    with pytest.raises(ValueError, match=rf"got {missing} in the deepspeed adaptor 'wrong'.*ENABLE_DEEPSPEED"):
        accelerators.enable([make_adaptor(), invalid], {})
    assert call_all(module) == ["whole", "fixed", "base"]
    accelerators.enable([make_adaptor(), invalid], {"ENABLE_DEEPSPEED_ADAPTOR": "0"}).disable()


def test_failing_replacement_restores_other_patches(module: Any) -> None:
    failing = Adaptor("torch", "failing", (Patch("patched.number", lambda old: 1 / 0, "a test"),))
    with pytest.raises(ZeroDivisionError):
        accelerators.enable([make_adaptor(), failing], {})
    assert call_all(module) == ["whole", "fixed", "base"]


def test_enable_rejects_two_patches_of_same_target(module: Any) -> None:
    with pytest.raises(
        ValueError, match="a target must be patched only once, got patched.whole again in the torch adaptor"
    ):
        accelerators.enable([make_adaptor(), Adaptor("torch", "again", (make_patch("whole", None),))], {})
    assert call_all(module) == ["whole", "fixed", "base"]


def test_disable_keeps_foreign_patch_raises_and_restores_others(module: Any) -> None:
    applied = accelerators.enable([make_adaptor()], {})
    module.whole = other = lambda: "other"
    with pytest.raises(RuntimeError, match="got patched.whole replaced by other code"):
        applied.disable()
    assert module.whole is other
    assert call_all(module) == ["other", "fixed", "base"]


def test_invalid_switches_and_packages_raise(module: Any) -> None:
    with pytest.raises(ValueError, match="the environment variable ENABLE_TORCH_ADAPTOR must be 0 or 1, got 'no'"):
        accelerators.enable([make_adaptor()], {"ENABLE_TORCH_ADAPTOR": "no"})
    with pytest.raises(ValueError, match="of adaptor three must be one of torch, deepspeed, megatron, got 'cuda'"):
        make_adaptor("cuda")
