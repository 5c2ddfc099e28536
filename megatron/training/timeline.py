"""The picture that a run with --pipeline-trace leaves in its folder, instead of tds's own one. Rank 0 only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron import log
from tds import tracing

TOOL = Path(__file__).resolve().parents[2] / "tools" / "draw_schedule.py"
PICTURE = "schedule.png"


def draw(trace: str, folder: Path, patience_s: float) -> str | None:
    """Draw the last traced step into ``folder``; return what to say of it, or None with a warning in the log.

    Args:
        trace: the folder that all ranks have written their traces to.
        patience_s: the other ranks wait meanwhile, and not for ever.
    """
    picture = folder / PICTURE
    command = [sys.executable, str(TOOL), "--trace", trace, "--out", str(picture)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        told = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        log.warning(f"no picture of the pipeline's trace in {trace}: {told[-1] if told else error}")
        return None
    tracing.leave_picture(trace)
    bubble = next((" ".join(line.split()) for line in done.stdout.splitlines() if line.startswith("bubble")), "")
    return f"{picture}: {bubble}; {trace} is for Perfetto"
