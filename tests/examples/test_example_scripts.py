"""The run scripts of examples/: every variable on top has its effect, and what is left empty is what is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.config import parse
from megatron.models.registry import FAMILIES
from tests.test_run_script import COMMON, ROOT, fake_python, run

__all__ = ["fake_python"]  # the fixture

OWN = {
    "llama": {
        "SEQLEN": ("65", "--seq-length 65"),
        "NGROUPS": ("6", "--num-query-groups 6"),
        "NFF": ("77", "--ff-hidden-size 77"),
    },
    "bert": {"SEQLEN": ("65", "--seq-length 65")},
    "mpt": {"SEQLEN": ("65", "--seq-length 65")},
}
"""Family -> its own variables, with a value and the flag that this becomes."""
every_family = pytest.mark.parametrize("family", OWN)


def script_of(family: str) -> Path:
    return ROOT / FAMILIES[family].run_script


@every_family
def test_every_variable_of_the_script_has_its_effect(family: str, fake_python: Path) -> None:
    effects = COMMON | OWN[family]
    top = script_of(family).read_text().split("# ----")[0]
    assert set(re.findall(r"^(\w+)=\$\{\1:-", top, re.M)) == set(effects)
    said = run(fake_python, script=script_of(family), **{name: value for name, (value, _) in effects.items()}).stdout
    assert [effect for _, effect in effects.values() if effect not in said] == []
    assert f"/{FAMILIES[family].program} --pipe-parallel-size 4 " in said


@every_family
def test_what_is_not_set_is_what_its_comment_names(family: str, fake_python: Path) -> None:
    said = run(fake_python, "--dry-run", script=script_of(family)).stdout
    assert said.splitlines()[0].endswith(f"{FAMILIES[family].program} --dry-run")
    files = {"MEGATRON_DEFAULTS": "defaults", "MEGATRON_VARIABLES": "variables"}
    env = {name: Path(f"{fake_python}.{kind}").read_text() for name, kind in files.items()}
    config = parse(["--dry-run"], world_size=4, env=env, family=family)
    assert config.given == ("dry_run",)
    args = vars(config.namespace())
    documented = dict(re.findall(r"^(\w+)=\$\{\1:-\} +# (\d+)\b(?!\.)", script_of(family).read_text(), re.M))
    fields = {
        name: effect.split()[0].lstrip("-").replace("-", "_") for name, (_, effect) in (COMMON | OWN[family]).items()
    }
    checked = {name: (str(args[fields[name]]), value) for name, value in documented.items() if fields[name] in args}
    assert len(checked) == 6 + len(OWN[family])
    assert all(got == value for got, value in checked.values()), checked
    assert config.parallel.pipe_parallel_size == config.parallel.model_parallel_size == 2
    assert config.run.deepspeed_config == str(script_of(family).parent / f"ds_config_{family}.json")
    assert (config.model.hidden_bias, config.model.hidden_dropout) == (family == "bert", 0.0)
