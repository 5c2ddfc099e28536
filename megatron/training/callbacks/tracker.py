"""Tracker: base of the callbacks that send a run's records to an experiment tracker or a monitoring system."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from megatron import files, log
from megatron.config import Config
from megatron.config.secrets import mask_secrets
from megatron.errors import ConfigError
from megatron.training.callbacks.metrics_writer import Metrics, flatten_metrics
from megatron.training.rank_0 import run_on_rank_0
from megatron.training.trainer import Callback

# Rank 0 sends the records, from a thread, so that a slow service does not delay training. The tracker's id of the run
# is stored in ``NAME.json`` in the run folder, together with the last steps that earlier starts have recorded. A
# resumed run continues the same curves and does not send the steps up to there again.

CLOSE_TIMEOUT_S = 20.0
"""Seconds to wait for pending records at the end; must be less than --exit-grace, after which ranks are killed."""
MAX_PENDING_RECORDS = 10_000
RECORD_TYPES = ("train", "valid", "test", "tasks", "save")

Record = tuple[str, int, dict[str, float]]
"""(record type, step, values by name)."""


class Tracker(Callback):
    """Sends every record of a run to one service. Subclasses implement ``open_run``, ``send`` and ``finish``.

    | failure | effect |
    |---|---|
    | at the start of a job | ConfigError with ``advice``, on every rank |
    | at a restart by the launcher, or later | one warning; nothing more is sent, and training continues |

    Attributes:
        service: the service's name in messages.
        file_name: file in the run folder with the service's id of the run; "" if the service stores no history, so
            that repeated steps are sent again.
        flag: the flag that enables the tracker.
        advice: how to fix a failed start.
    """

    service: ClassVar[str]
    file_name: ClassVar[str] = ""
    flag: ClassVar[str]
    advice: ClassVar[str]

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._pending: queue.Queue[Record | None] = queue.Queue(MAX_PENDING_RECORDS)
        self._has_failed_run = False
        self._folder = Path()
        self._run_id: str | None = None
        self._sent_steps: dict[str, int] = {}  # last step of each record type that any start has recorded
        self._skipped_steps: dict[str, int] = {}  # records up to these steps are not sent again

    # Implemented by subclasses.

    def open_run(self, config: Config, folder: Path, run_id: str | None) -> str | None:
        """Open the run at the service. Called on rank 0.

        Args:
            folder: the run folder.
            run_id: id of the run to continue; None for a new run.

        Returns:
            The service's id of the run, if it has ids.
        """
        raise NotImplementedError

    def send(self, record_type: str, step: int, values: Mapping[str, float]) -> None:
        """Send one record; ``values`` are named "record_type/name"."""
        raise NotImplementedError

    def finish(self, *, has_failed: bool) -> None:
        """Mark the run as succeeded or failed, and wait for uploads."""
        raise NotImplementedError

    # Hooks.

    def on_train_start(self) -> None:
        """Open the run. Collective.

        Raises:
            ConfigError: the service cannot be used; the same on every rank.
        """
        trainer = self.trainer
        metrics = trainer.find(Metrics)
        recorded_steps = metrics.writer.recorded_steps if metrics is not None and metrics.writer is not None else {}
        is_continued = trainer.resumed_step is not None or trainer.config.checkpoint.load_if_exists
        run_on_rank_0(
            trainer.world,
            lambda: self.start(trainer.config, trainer.folder, recorded_steps, is_continued=is_continued),
        )

    def on_load_end(self, step: int) -> None:
        if self._thread is not None and self.file_name:
            self._skipped_steps = dict(self._sent_steps)
            self._store_run()

    def on_log(self, metrics: dict[str, Any]) -> None:
        self.write("train", self.trainer.progress.step, metrics)

    def on_evaluate_end(self, split: str, values: dict[str, Any]) -> None:
        self.write(split, self.trainer.progress.step, values)

    def on_save_staged(self, step: int, values: dict[str, Any]) -> None:
        self.write("save", step, values)

    def on_save_end(self, step: int, path: Path | None, values: dict[str, Any]) -> None:
        self.write("save", step, values)

    def on_train_end(self) -> None:
        self.close()

    def on_exception(self, error: BaseException) -> None:
        self.close(has_failed=True)

    # Run and records, on rank 0.

    def start(
        self,
        config: Config,
        folder: Path,
        recorded_steps: Mapping[str, int] | None = None,
        *,
        is_continued: bool = True,
    ) -> None:
        """Open the run, continuing this folder's run if there is one, and start the sending thread.

        An evaluation becomes a separate run and does not modify the folder's run.

        Args:
            recorded_steps: last step of each record type in metrics.jsonl before this start.
            is_continued: False if training starts from scratch. The service then gets a new run, except after a
                restart by the launcher.

        Raises:
            ConfigError: the service cannot be used.
        """
        is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        has_history = bool(self.file_name) and not config.checkpoint.eval_only
        self._folder = folder
        if has_history and (is_continued or is_restart):
            self._read_run(recorded_steps or {})
        try:
            run_id = self.open_run(config, folder, self._run_id)
        except (Exception, SystemExit) as error:  # some packages call sys.exit without credentials
            problem = mask_secrets(f"{type(error).__name__}: {error}")
            if is_restart:
                log.warning(f"no records are sent to {self.service} ({problem}). Training continues")
                return
            if isinstance(error, ConfigError):
                raise
            flag = mask_secrets(f"{self.flag} {self._flag_value(config)}")
            raise ConfigError(f"{self.service} cannot be used with {flag}: {problem}. {self.advice}") from error
        self._run_id = run_id
        if has_history:
            self._store_run()
        self._thread = threading.Thread(target=self._send_pending, name=f"tracker-{self.flag[2:]}", daemon=True)
        self._thread.start()

    def write(self, record_type: str, step: int, values: Mapping[str, Any]) -> None:
        """Queue a record's numbers, unless an earlier start has sent them or the service has failed."""
        if self._thread is None or step <= self._skipped_steps.get(record_type, -1):
            return
        self._sent_steps[record_type] = max(step, self._sent_steps.get(record_type, -1))
        try:
            self._pending.put_nowait((record_type, step, dict(flatten_metrics(record_type, values))))
        except queue.Full:
            self._report_failure(f"{MAX_PENDING_RECORDS} records are pending")
            self._thread = None

    def close(self, *, has_failed: bool = False) -> None:
        """Finish the run, and wait up to ``CLOSE_TIMEOUT_S`` for pending records."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._has_failed_run = has_failed
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        with suppress(queue.Full):  # the service does not answer
            self._pending.put(None, timeout=CLOSE_TIMEOUT_S)
        thread.join(max(deadline - time.monotonic(), 0.0))
        if thread.is_alive():
            log.warning(
                f"{self.service} did not receive all records within {CLOSE_TIMEOUT_S:g} s. {self.pending_advice}"
            )

    @property
    def pending_advice(self) -> str:
        """Location of the records that the service did not receive in time."""
        return "All records are in metrics.jsonl"

    def _send_pending(self) -> None:
        """Send the queued records until ``close`` is called; stop at the first error. Runs in the thread."""
        record: Record | None = None
        try:
            while (record := self._pending.get()) is not None:
                self.send(*record)
            self.finish(has_failed=self._has_failed_run)
        except BaseException as error:  # some packages call sys.exit
            self._report_failure(f"{type(error).__name__}: {error}")
            while record is not None:  # keeps the queue from filling up until ``close``
                record = self._pending.get()

    def _report_failure(self, problem: str) -> None:
        log.warning(f"no further records are sent to {self.service} ({mask_secrets(problem)}). Training continues")

    def _flag_value(self, config: Config) -> str:
        return str(getattr(config.logging, self.flag[2:].replace("-", "_")))

    def _read_run(self, recorded_steps: Mapping[str, int]) -> None:
        """Read the run's id, and skip the steps that earlier starts have recorded. No-op for a new run."""
        try:
            stored = json.loads((self._folder / self.file_name).read_text())
            self._run_id, last_steps = str(stored["id"]), dict(stored.get("last_steps", {}))
        except (OSError, ValueError, KeyError, TypeError):
            return
        self._sent_steps = {
            record_type: max(last_steps.get(record_type, -1), recorded_steps.get(record_type, -1))
            for record_type in {*last_steps, *recorded_steps}
        }
        self._skipped_steps = dict(self._sent_steps)

    def _store_run(self) -> None:
        """Store the run's id, and the last steps that earlier starts have recorded."""
        content = {"id": self._run_id, **({"last_steps": self._sent_steps} if self._sent_steps else {})}
        try:
            files.replace_bytes(self._folder / self.file_name, json.dumps(content).encode() + b"\n")
        except OSError as error:
            log.warning(
                f"{self._folder / self.file_name} could not be written ({error}): a resumed run will be a new run at "
                f"{self.service}"
            )
