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
from megatron.training import data, entrypoint, failure, metrics, report, trainer  # noqa: E402

START = [int(os.environ["KILL_LIFE"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
_record = os.open(
    Path(os.environ["KILL_RECORD"], f"rank-{os.environ['RANK']}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
)
_read: list[int] = []


def record(**told: Any) -> None:
    """Append one line."""
    os.write(_record, json.dumps({"start": START, "at": time.time(), **told}).encode() + b"\n")


def record_run() -> None:
    """Let the parts of a run tell what they do; leave out what only costs time."""
    report.MATMUL_SECONDS = 0.0
    metrics.draw_losses = lambda *_: None
    prepare, advance, note_durable = trainer._prepare, trainer._advance, failure.note_committed_step
    take = data.TimedBatches.__next__

    def prepare_and_record(run: trainer.Run) -> Any:
        record(begins=run.progress.step, loaded=run.loaded.name if run.loaded else None)
        return prepare(run)

    def take_and_sum(batches: data.TimedBatches) -> Any:
        batch = take(batches)
        _read.extend(zlib.crc32(row.numpy().tobytes()) for row in batch["text"])
        return batch

    def advance_and_record(run: trainer.Run, result: Any, samples: int) -> None:
        advance(run, result, samples)
        record(step=run.progress.step, loss=float(result.loss).hex(), tokens=list(_read))
        _read.clear()

    def note_durable_and_record(step: int) -> None:
        note_durable(step)
        record(durable=step)

    trainer._prepare, trainer._advance, failure.note_committed_step = (
        prepare_and_record,
        advance_and_record,
        note_durable_and_record,
    )
    data.TimedBatches.__next__ = take_and_sum  # type: ignore[method-assign]


if __name__ == "__main__":
    record_run()
    entrypoint.pretrain(
        pretrain_gpt2.train_valid_test_datasets_provider,
        pretrain_gpt2.model_provider,
        pretrain_gpt2.forward_step,
        name="gpt2",
    )
