"""What a forked rank does with the sockets and files that its launcher had open."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from megatron.launch import processes

HELD: list[socket.socket] = []
"""A socket of the launcher, which a forked rank meets under this name."""


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        HELD.append(server)
        yield server
        HELD.clear()


def run_forked(folder: Path, text: str) -> int:
    """Return how a forked rank ends that runs this script."""
    script = folder / "script.py"
    script.write_text(text)
    process = processes.RankProcess(0, 0, processes.start_rank(str(script), [], dict(os.environ), is_forked=True))
    end = time.monotonic() + 30
    while not process.reap() and time.monotonic() < end:
        time.sleep(0.005)
    return process.status


def test_forked_rank_closes_launcher_sockets(listener, tmp_path):
    """Else a port that the launcher has left stays taken for as long as a rank lives."""
    code = run_forked(
        tmp_path, f"import os\nlink = os.readlink('/proc/self/fd/{listener.fileno()}')\nassert 'null' in link\n"
    )
    assert code == 0


def test_rank_files_survive_collection_of_launcher_sockets(listener, tmp_path):
    """A socket that is collected late closes its number once more; it was gloo's epoll once, and the rank aborted."""
    script_text = (
        "import os\n"
        "from tests.launch.test_inherited import HELD\n"
        "files = [open(os.devnull) for _ in range(64)]\n"
        "HELD.pop().close()\n"
        "for file in files:\n"
        "    os.fstat(file.fileno())\n"
    )
    assert run_forked(tmp_path, script_text) == 0
