"""Rank 0 speaks; the others only warn, and say who they are."""

from __future__ import annotations

import pytest

from megatron import log


@pytest.fixture(autouse=True)
def reset_log():
    yield
    log._LOGGER.handlers.clear()
    log.warn_once.cache_clear()


def log_all_levels():
    log.info("a note")
    log.warning("look out")
    log.error("it broke")


def test_rank_0_logs_all_levels(capsys):
    log.configure(0)
    log_all_levels()
    assert capsys.readouterr().err.splitlines() == ["a note", "warning: look out", "it broke"]


def test_other_ranks_log_warnings_and_errors_with_rank(capsys):
    log.configure(3)
    log_all_levels()
    assert capsys.readouterr().err.splitlines() == ["[rank 3] warning: look out", "[rank 3] it broke"]


def test_log_works_without_configure(capsys):
    log._LOGGER.handlers.clear()
    log.info("a note")
    assert capsys.readouterr().err == "a note\n"


def test_log_level_of_rank_0_is_configurable(capsys):
    log.configure(0, level="warning")
    log_all_levels()
    assert "a note" not in capsys.readouterr().err


def test_configure_twice_logs_each_message_once(capsys):
    log.configure(0)
    log.configure(0)
    log.info("a note")
    assert capsys.readouterr().err == "a note\n"


def test_warn_once_logs_each_text_once(capsys):
    log.configure(0)
    for text in ("one", "one", "two", "one"):
        log.warn_once(text)
    assert capsys.readouterr().err.splitlines() == ["warning: one", "warning: two"]


def test_log_writes_nothing_to_stdout(capsys):
    log.configure(0)
    log_all_levels()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("value", "memory", "disk"),
    [(0, "0 B", "0 B"), (1000, "1000 B", "1.0 kB"), (1 << 10, "1.00 KiB", "1.0 kB"), (1_250_000, "1.19 MiB", "1.2 MB"),
     (3 << 29, "1.50 GiB", "1.6 GB"), (2 * 10**15, "1862645.15 GiB", "2000000.0 GB")],
)  # fmt: skip
def test_human_bytes_selects_largest_unit(value: int, memory: str, disk: str) -> None:
    assert log.human_bytes(value) == memory
    assert log.human_bytes(value, ("B", "kB", "MB", "GB"), digits=1) == disk


def test_human_bytes_keeps_first_unit_for_small_values() -> None:
    assert log.human_bytes(40_000, ("MB", "GB"), digits=1) == "0.0 MB"
    assert log.human_bytes(5e8, ("GB", "TB")) == "0.50 GB" and log.human_bytes(1e12, ("GB", "TB")) == "1.00 TB"
