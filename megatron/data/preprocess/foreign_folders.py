"""Folders that Spark and datatrove have written: which of their files hold text, and whether the tool has finished.

| in a folder | what it says | what is done |
|---|---|---|
| ``_SUCCESS``, ``_metadata``, ``_common_metadata`` | Spark or Hadoop has finished | left out |
| ``_temporary`` | it is writing, or was cut off | refused |
| ``_started_ID`` without ``_committed_ID`` | the same on Databricks | refused |
| ``NAME._COPYING_`` | ``hdfs dfs -put`` is copying, or was cut off | refused |
| ``_delta_log`` | a Delta table: some of its files are of older versions | refused |
| ``executor.json`` and ``completions`` | datatrove's log folder | left out; refused where tasks are not completed |

A file that was cut off is found by its own format: gzip by its end, parquet by its footer.

Source: Spark's ``HadoopFSUtils.shouldFilterOutPathName``, Hadoop's ``FileOutputCommitter``, and datatrove's
``jobs_status``.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from megatron import log
from megatron.errors import DataError

OF_OTHER_TOOLS = ("_SUCCESS", "_metadata", "_common_metadata", "_started_", "_committed_")
_NAMED = 5


def is_hidden(name: str) -> bool:
    """Return whether a name in a folder is left out; ``_year=2024`` is a partition of a table, and is not."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def check_is_finished(folder: Path | str, names: Collection[str]) -> None:
    """Check that no tool is still writing ``folder``, which has these ``names``.

    Raises:
        DataError: one is, or was cut off.
    """
    if "_delta_log" in names:
        raise DataError(
            f"--input {folder} is a Delta table, some of whose files may be of older versions. Write its present state "
            "as parquet first."
        )
    signs = [name for name in names if name == "_temporary" or name.endswith("._COPYING_")]
    signs += [
        name
        for name in names
        if name.startswith("_started_") and "_committed_" + name.removeprefix("_started_") not in names
    ]
    if signs:
        raise DataError(
            f"--input {folder} must be finished; {min(signs)} says that Spark or Hadoop is still writing it, or was "
            f"cut off. Wait for it or run it again; delete {min(signs)} if you know that all files are there."
        )


def is_log_folder(folder: Path, names: Collection[str]) -> bool:
    """Return whether ``folder`` is where datatrove tells of a run, which has completed.

    Raises:
        DataError: the run has not completed.
    """
    if not {"executor.json", "completions"} <= set(names):
        return False
    try:
        num_tasks = int(json.loads((folder / "executor.json").read_bytes())["world_size"])
        completed = {path.name for path in (folder / "completions").iterdir()}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if missing := [f"{task:05d}" for task in range(num_tasks) if f"{task:05d}" not in completed]:
        raise DataError(
            f"--input {folder} is the log folder of a run of datatrove that has not completed: "
            f"{len(missing)} of {num_tasks} tasks are missing, {', '.join(missing[:_NAMED])}"
            f"{' ...' if len(missing) > _NAMED else ''}. Run it again: it does what is missing."
        )
    log.info(f"{folder}: left out, it is the log folder of datatrove, all {num_tasks} tasks completed")
    return True
