"""PipelinePicture: draws schedule.png for a run with --pipeline-trace, instead of the picture that tds draws."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron import log
from megatron.training.trainer import Callback

TOOL = Path(__file__).resolve().parents[3] / "tools" / "draw_schedule.py"
PICTURE = "schedule.png"


class PipelinePicture(Callback):
    """Draws a pipeline's last traced step when the run ends.

    Attributes:
        text: one-line summary with the picture's path; set on rank 0.
    """

    text: str | None = None

    def on_train_end(self) -> None:
        trainer, parallel = self.trainer, self.trainer.config.parallel
        if parallel.pipeline_trace is None or trainer.last_loss is None:
            return
        if trainer.world.rank == 0:
            self.text = draw_schedule(parallel.pipeline_trace, trainer.folder, 0.5 * parallel.phase_timeout_s)
        trainer.world.barrier()  # keeps all ranks alive while rank 0 draws


def draw_schedule(trace: str, folder: Path, timeout_s: float) -> str | None:
    """Draw the last traced step into ``folder``; return a one-line summary, or log a warning and return None.

    Args:
        trace: folder with all ranks' traces.
        timeout_s: timeout in seconds; the other ranks wait until the picture is drawn.
    """
    picture = folder / PICTURE
    command = [sys.executable, str(TOOL), "--trace", trace, "--out", str(picture)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        log.warning(f"the pipeline trace in {trace} could not be drawn: {lines[-1] if lines else error}")
        return None
    from tds import plot  # imports matplotlib

    plot.disable_drawing(trace)
    bubble = next((" ".join(line.split()) for line in result.stdout.splitlines() if line.startswith("bubble")), "")
    return f"{picture}: {bubble}; open {trace} in Perfetto"
