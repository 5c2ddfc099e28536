"""Check that folders written by Spark, datatrove or Hugging Face's datasets are complete, and select their text files.

| name in the folder | meaning | action |
|---|---|---|
| ``_SUCCESS``, ``_metadata``, ``_common_metadata`` | Spark or Hadoop has finished | skip |
| ``_temporary`` | Spark or Hadoop is writing, or was interrupted | reject |
| ``_started_ID`` without ``_committed_ID`` | the same on Databricks | reject |
| ``NAME._COPYING_`` | ``hdfs dfs -put`` is copying, or was interrupted | reject |
| ``_delta_log`` | a Delta table: some files may belong to older versions | reject |
| ``executor.json`` and ``completions`` | datatrove's log folder | skip; reject if tasks are incomplete |
| ``dataset_info.json``, ``dataset_dict.json``, ``state.json`` | ``datasets`` wrote Arrow files | skip |
| ``cache-*.arrow`` next to them | results from ``map`` and ``filter`` | skip |

Truncated files are detected by their own format, such as gzip's end or parquet's footer.

Source: Spark's ``HadoopFSUtils.shouldFilterOutPathName``, Hadoop's ``FileOutputCommitter``, datatrove's
``jobs_status``, and ``Dataset.save_to_disk`` of ``datasets``.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path

from megatron import log, object_store
from megatron.errors import DataError

TOOL_FILE_PREFIXES = ("_SUCCESS", "_metadata", "_common_metadata", "_started_", "_committed_")
_MAX_LISTED = 5
_INFO, _DICT, _STATE = "dataset_info.json", "dataset_dict.json", "state.json"


def is_hidden(name: str) -> bool:
    """Check if a name in a folder is skipped; ``_year=2024``, a table partition, is not."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def check_is_finished(folder: Path | str, names: Collection[str]) -> None:
    """Check that no tool is still writing ``folder``, which contains ``names``.

    Raises:
        DataError: a tool is writing the folder or was interrupted, or the folder is a Delta table.
    """
    if "_delta_log" in names:
        raise DataError(
            f"--input {folder} is a Delta table; some of its files may belong to older versions. Write its current "
            "version as parquet first."
        )
    unfinished_names = [name for name in names if name == "_temporary" or name.endswith("._COPYING_")]
    unfinished_names += [
        name
        for name in names
        if name.startswith("_started_") and "_committed_" + name.removeprefix("_started_") not in names
    ]
    if unfinished_names:
        raise DataError(
            f"--input {folder} must be finished; {min(unfinished_names)} shows that Spark or Hadoop is still writing "
            "it or was interrupted. Wait for the job, or run it again. If all files are complete, delete "
            f"{min(unfinished_names)}."
        )


def is_log_folder(folder: Path, names: Collection[str]) -> bool:
    """Return True for the log folder of a completed datatrove run.

    Raises:
        DataError: the run is not completed.
    """
    if not {"executor.json", "completions"} <= set(names):
        return False
    try:
        num_tasks = int(json.loads((folder / "executor.json").read_bytes())["world_size"])
        completed = {path.name for path in (folder / "completions").iterdir()}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if missing_tasks := [f"{task:05d}" for task in range(num_tasks) if f"{task:05d}" not in completed]:
        raise DataError(
            f"--input {folder} is the log folder of a datatrove run that has not completed: "
            f"{len(missing_tasks)} of {num_tasks} tasks are missing, {', '.join(missing_tasks[:_MAX_LISTED])}"
            f"{' ...' if len(missing_tasks) > _MAX_LISTED else ''}. Run it again to complete the missing tasks."
        )
    log.info(f"{folder}: skipped the log folder of datatrove, all {num_tasks} tasks completed")
    return True


def datasets_names_to_skip(folder: Path | str, names: Collection[str]) -> set[str]:
    """Find the names to skip in a Hugging Face ``datasets`` folder: metadata, and Arrow files that are not data.

    Raises:
        DataError: files that state.json lists are missing.
    """
    if _DICT in names:
        log.warn_once(f"{folder}: all splits of the dataset are read; name one of its folders to read one split")
    arrow_names = {name for name in names if name.endswith(".arrow")}
    if not arrow_names or not {_INFO, _STATE} & set(names):
        return {_DICT} & set(names)
    listed = _files_in_state(folder) if _STATE in names else None
    if listed is None:
        unlisted = {name for name in arrow_names if fnmatch(name, "cache-*.arrow")}
    else:
        unlisted = arrow_names - listed
        if missing_names := sorted(listed - arrow_names):
            raise DataError(
                f"--input {folder} must contain all files that {_STATE} lists; {len(missing_names)} are missing: "
                f"{', '.join(missing_names[:_MAX_LISTED])}{' ...' if len(missing_names) > _MAX_LISTED else ''}. Copy "
                "the folder again"
            )
    if unlisted:
        log.warn_once(
            f"{folder}: skipped {', '.join(sorted(unlisted)[:_MAX_LISTED])}, which the dataset does not list as data"
        )
    return unlisted | ({_INFO, _STATE, _DICT} & set(names))


def _files_in_state(folder: Path | str) -> set[str] | None:
    """Read the Arrow files that state.json lists; None if the file belongs to another program."""
    path = folder / _STATE if isinstance(folder, Path) else object_store.join(folder, _STATE)
    try:
        with object_store.open_file(path) as file:
            return {str(entry["filename"]) for entry in json.loads(file.read())["_data_files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
