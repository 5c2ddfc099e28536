"""What a rank that has ended left beside the failure file."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron.training import failure_files, position


def position_of(failure_file: Path, rank: int) -> position.Position:
    """Return its place, what it was at last and whether its run had ended; empty if it did not come so far."""
    try:
        return position.read_position(Path(position.page_of(str(failure_file), rank)).read_bytes())
    except OSError:
        return position.Position()


def show_trace(failure_file: Path, rank: int) -> None:
    """Show what a crash in native code has left, each line with the rank's number."""
    try:
        trace = Path(failure_files.trace_of(str(failure_file), rank)).read_text(errors="replace")
    except OSError:
        return
    if trace.strip():
        sys.stderr.write("".join(f"rank {rank}: {line}\n" for line in trace.splitlines() if line.strip()))
        sys.stderr.flush()
