"""What is wrong with a command line is told in one line."""

from __future__ import annotations

import argparse

import pytest

from megatron.arguments.argparse_parsers import OneLineParser, RaisingParser


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--size", type=int, required=True)
    return parser


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: --size"),
        (["--size", "x"], "argument --size: invalid int value: 'x'"),
        (["--size", "1", "--other"], "unrecognized arguments: --other"),
    ],
)
def test_error_is_one_line_with_exit_code_2_or_raised(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        add_flags(OneLineParser(prog="tool.py")).parse_args(words)
    assert (exit_info.value.code, capsys.readouterr().err) == (2, f"tool.py: {message}\n")
    with pytest.raises(ValueError) as error_info:
        add_flags(RaisingParser(prog="tool.py")).parse_args(words)
    assert str(error_info.value) == message and capsys.readouterr().err == ""
