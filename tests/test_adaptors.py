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


class Part(Base):
    @staticmethod
    def fixed() -> str:
        return "fixed"


def whole() -> str:
    return "whole"


@pytest.fixture
def target() -> Iterator[Any]:
    """A module to patch, with a function and two classes."""
    module = types.ModuleType("patched")
    module.whole, module.Part, module.number = whole, Part, 3
    sys.modules["patched"] = module
    yield module
    del sys.modules["patched"]


def patch(name: str, new: Any) -> Patch:
    return Patch(f"patched.{name}", lambda old: new, "a test")


def three(part: str = "torch") -> Adaptor:
    """Return an adaptor of a function, a static method and an inherited method."""
    named = {"whole": lambda: "new", "Part.fixed": staticmethod(lambda: "new"), "Part.inherited": lambda self: "new"}
    return Adaptor(part, "three", tuple(patch(name, new) for name, new in named.items()))


def answers(target: Any) -> list[str]:
    return [target.whole(), target.Part.fixed(), target.Part().inherited()]


def test_all_attributes_are_replaced_and_put_back_as_they_were(target: Any) -> None:
    before = {name: dict(vars(owner)) for name, owner in {"module": target, "class": Part}.items()}
    applied = accelerators.enable([three()], {})
    assert answers(target) == ["new"] * 3
    applied.disable()
    assert answers(target) == ["whole", "fixed", "base"]
    assert {"module": dict(vars(target)), "class": dict(vars(Part))} == before
    assert "inherited" not in vars(Part) and isinstance(vars(Part)["fixed"], staticmethod)
    applied.disable()


def test_a_replacement_is_made_of_what_was_there(target: Any) -> None:
    doubled = Adaptor("torch", "doubled", (Patch("patched.number", lambda old: 2 * old, "a test"),))
    applied = accelerators.enable([doubled], {})
    assert target.number == 6
    applied.disable()
    assert target.number == 3


@pytest.mark.parametrize(
    ("env", "on"),
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
def test_the_environment_switches_parts_off(target: Any, env: dict[str, str], on: set[str]) -> None:
    each = [
        Adaptor(part, part, (patch(f"Part.{part}", "new"),))
        for part in accelerators.PARTS
        if not setattr(Part, part, "")
    ]
    applied = accelerators.enable(each, env)
    assert {part for part in accelerators.PARTS if getattr(Part, part) == "new"} == on
    assert {row[0].partition(":")[0] for row in accelerators.adaptor_rows(each, env) if row[1] == "on"} == on
    applied.disable()
    for part in accelerators.PARTS:
        delattr(Part, part)


@pytest.mark.parametrize("missing", ["patched.gone", "patched.Part.gone", "not_there.whole", "patched.Gone.whole"])
def test_a_target_that_is_missing_is_told_and_nothing_is_applied(target: Any, missing: str) -> None:
    wrong = Adaptor("deepspeed", "wrong", (Patch(missing, lambda old: "new", "a test"),))
    with pytest.raises(ValueError, match=rf"got {missing} in the deepspeed adaptor 'wrong'.*ENABLE_DEEPSPEED"):
        accelerators.enable([three(), wrong], {})
    assert answers(target) == ["whole", "fixed", "base"]
    accelerators.enable([three(), wrong], {"ENABLE_DEEPSPEED_ADAPTOR": "0"}).disable()


def test_a_replacement_that_fails_takes_the_others_back(target: Any) -> None:
    failing = Adaptor("torch", "failing", (Patch("patched.number", lambda old: 1 / 0, "a test"),))
    with pytest.raises(ZeroDivisionError):
        accelerators.enable([three(), failing], {})
    assert answers(target) == ["whole", "fixed", "base"]


def test_two_patches_of_one_target_are_refused(target: Any) -> None:
    with pytest.raises(ValueError, match="a target must be patched only once, got patched.whole again in the torch adaptor"):
        accelerators.enable([three(), Adaptor("torch", "again", (patch("whole", None),))], {})
    assert answers(target) == ["whole", "fixed", "base"]


def test_what_someone_else_has_replaced_since_is_told_and_the_rest_put_back(target: Any) -> None:
    applied = accelerators.enable([three()], {})
    target.whole = other = lambda: "other"
    with pytest.raises(RuntimeError, match="got patched.whole replaced by other code"):
        applied.disable()
    assert target.whole is other
    assert answers(target) == ["other", "fixed", "base"]


def test_wrong_switches_and_parts_are_told(target: Any) -> None:
    with pytest.raises(ValueError, match="the environment variable ENABLE_TORCH_ADAPTOR must be 0 or 1, got 'no'"):
        accelerators.enable([three()], {"ENABLE_TORCH_ADAPTOR": "no"})
    with pytest.raises(ValueError, match="of adaptor three must be one of torch, deepspeed, megatron, got 'cuda'"):
        three("cuda")
