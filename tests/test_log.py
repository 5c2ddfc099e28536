"""Rank 0 speaks; the others only warn, and say who they are."""

from __future__ import annotations

import pytest

from megatron import log


@pytest.fixture(autouse=True)
def as_before():
    yield
    log._LOGGER.handlers.clear()
    log.warn_once.cache_clear()


def say_everything():
    log.info("a note")
    log.warning("look out")
    log.error("it broke")


def test_rank_0_says_everything_as_it_is(capsys):
    log.configure(0)
    say_everything()
    assert capsys.readouterr().err.splitlines() == ["a note", "warning: look out", "it broke"]


def test_other_ranks_say_warnings_and_errors_with_their_number(capsys):
    log.configure(3)
    say_everything()
    assert capsys.readouterr().err.splitlines() == ["[rank 3] warning: look out", "[rank 3] it broke"]


def test_a_tool_may_speak_without_configuring(capsys):
    log._LOGGER.handlers.clear()
    log.info("a note")
    assert capsys.readouterr().err == "a note\n"


def test_rank_0_can_be_made_quieter(capsys):
    log.configure(0, level="warning")
    say_everything()
    assert "a note" not in capsys.readouterr().err


def test_configuring_twice_does_not_say_things_twice(capsys):
    log.configure(0)
    log.configure(0)
    log.info("a note")
    assert capsys.readouterr().err == "a note\n"


def test_warn_once_says_each_text_once(capsys):
    log.configure(0)
    for text in ("one", "one", "two", "one"):
        log.warn_once(text)
    assert capsys.readouterr().err.splitlines() == ["warning: one", "warning: two"]


def test_standard_output_stays_free(capsys):
    log.configure(0)
    say_everything()
    assert capsys.readouterr().out == ""
