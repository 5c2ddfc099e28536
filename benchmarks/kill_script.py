"""What a rank of a killed run executes: ``pretrain_gpt2.py`` as it is, with a record of its starts and steps.

Each rank appends lines of JSON to ``$KILL_RECORD/rank-R.jsonl``, one call a line, so that a kill cuts none off:

| line | says |
|---|---|
| ``begins``, ``loaded`` | the step that the start goes on after, and the checkpoint it has taken up |
| ``step``, ``loss``, ``tokens`` | a step that was done, its loss in hexadecimal, a checksum of each sample read |
| ``durable`` | rank 0 has told the launcher of this checkpoint |

Each line also holds ``start``, the number of the launcher's life and of its start, and ``at``, the time.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pretrain_gpt2  # noqa: E402
from megatron.training import Callback, data, entrypoint, failure  # noqa: E402
from megatron.training.callbacks import metrics_writer, speed_monitor  # noqa: E402
from megatron.training.callbacks.checkpointer import Checkpointer  # noqa: E402

START = [int(os.environ["KILL_LIFE"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
_record = os.open(
    Path(os.environ["KILL_RECORD"], f"rank-{os.environ['RANK']}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
)
_read: list[int] = []


def record(**told: Any) -> None:
    """Append one line."""
    os.write(_record, json.dumps({"start": START, "at": time.time(), **told}).encode() + b"\n")


class Recorder(Callback):
    """Tells where the run begins, and each step that is done."""

    def on_train_start(self) -> None:
        checkpointer = self.trainer.find(Checkpointer)
        loaded = checkpointer.loaded if checkpointer else None
        record(begins=self.trainer.progress.step, loaded=loaded.name if loaded else None)

    def on_after_update(self, result: Any) -> None:
        record(step=self.trainer.progress.step, loss=float(result.loss).hex(), tokens=list(_read))
        _read.clear()


def record_run() -> None:
    """Let the parts of a run tell what they do; leave out what only costs time."""
    speed_monitor.MATMUL_SECONDS = 0.0
    metrics_writer.draw_losses = lambda *_: None
    take, note_durable = data.TimedBatches.__next__, failure.note_committed_step

    def take_and_sum(batches: data.TimedBatches) -> Any:
        batch = take(batches)
        _read.extend(zlib.crc32(row.numpy().tobytes()) for row in batch["text"])
        return batch

    def note_durable_and_record(step: int) -> None:
        note_durable(step)
        record(durable=step)

    failure.note_committed_step = note_durable_and_record
    data.TimedBatches.__next__ = take_and_sum  # type: ignore[method-assign]


if __name__ == "__main__":
    record_run()
    entrypoint.pretrain(
        pretrain_gpt2.train_valid_test_datasets_provider,
        pretrain_gpt2.model_provider,
        pretrain_gpt2.forward_step,
        name="gpt2",
        callbacks=[Recorder()],
    )
