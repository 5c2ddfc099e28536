"""What --help reads from a run script."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.arguments import run_script

SCRIPT_TEXT = """\
#!/usr/bin/env bash
# NOT_THIS=${NOT_THIS:-}  # a comment
NLAYERS=${NLAYERS:-}                              # 4
BATCHSIZE=${BATCHSIZE:-}                          # 8; samples of
                                                  #    a micro-batch
GAS=${GAS:-16}                                    # 2; micro-batches
mp_size=${mp_size:-1}                             # 1; slices
BARE=${BARE:-}

# ------
LATER=${LATER:-}                                  # none
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "run_x.sh"
    path.write_text(SCRIPT_TEXT)
    return path


def test_variables_have_comments_and_script_values(script: Path) -> None:
    assert list(run_script.variables_of(script)) == [
        ("NLAYERS", "4"),
        ("BATCHSIZE", "8; samples of a micro-batch"),
        ("GAS", "set to 16 in the script; 2; micro-batches"),
        ("mp_size", "1; slices"),
        ("BARE", ""),
    ]


def test_variables_text_names_flags_and_is_empty_without_script(script: Path) -> None:
    env = {run_script.SCRIPT_VARIABLE: str(script), run_script.FLAGS_VARIABLE: "--num-layers=NLAYERS --gas=GAS "}
    lines = run_script.variables_text(env).splitlines()
    assert "  NLAYERS=12 bash run_x.sh" in lines and "  NLAYERS, as --num-layers          4" in lines
    assert any(line.startswith("  BATCHSIZE   ") for line in lines) and max(map(len, lines)) <= 80
    assert run_script.command(env) == "bash run_x.sh"
    assert run_script.variables_text({}) == "" and run_script.command({}) is None


def test_paths_are_shown_relative_to_working_directory(script: Path) -> None:
    assert run_script.relative_to_cwd(str(script.parent / "data" / "x")) == "data/x"
    assert [run_script.relative_to_cwd(value) for value in ("/other/x", 3, None)] == ["/other/x", 3, None]
