"""A job's plan (inputs, units and options), resuming an interrupted job, and disk space checks."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shlex
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatron import files, log, object_store
from megatron.data import index_format
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocess.corpus import UNIT_BYTES, plan_units
from megatron.data.preprocess.job_types import STDIN, Counts, Job, Share, Unit
from megatron.data.preprocess.shards import PLAN, ShardFolder, shard_folder_path
from megatron.errors import DataError
from megatron.log import human_bytes
from megatron.tokenizer import Tokenizer, probe
from megatron.tokenizer.identity import is_same

# A job's identity: inputs, encoding options and units. Shards can only be used with their own plan.

FORMAT = 2
_MAX_LISTED = 5
_SHARE_OPTION = "--part"
_NO_LINK_ERRNOS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """Everything that determines a job's tokens.

    Args:
        inputs: (absolute path, bytes, modification time in ns) per file in order; a file that is read twice has two
            entries.
        units: digest over all units' paths, formats and ranges.
        options: tool options that affect the tokens or the units.
        tokenizer: properties that identify the tokenizer, by name.
        committed: the job's summary if its output files are in place and only the shards remain to be deleted; else
            None.
        num_units: unit count.
        eod_id: token id that ends every document; None if there is none.
        source: digest of the text; None: unknown.
        probe: ids of the probe texts; see ``megatron.tokenizer.probe``.
    """

    inputs: Sequence[tuple[str, int, int]]
    units: str
    options: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    committed: Mapping[str, Any] | None = None
    format: int = FORMAT
    num_units: int = 0
    eod_id: int | None = None
    source: str | None = None
    probe: Mapping[str, Any] | None = None

    @property
    def num_shares(self) -> int:
        """Number of jobs with ``--part`` that produce the output; 0 for a single job without ``--part``."""
        return int(self.options.get(_SHARE_OPTION) or 0)

    def digest(self) -> str:
        """Compute a digest that identifies this plan's finished units."""
        set_options = {name: value for name, value in self.options.items() if value is not None}
        values = [[list(entry) for entry in self.inputs], self.units, set_options, dict(self.tokenizer)]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    def publish(self, folder: Path) -> JobPlan | None:
        """Write the plan into the folder unless it has one; the result is the folder's plan, None if it is unreadable.

        If jobs start simultaneously on several machines, exactly one of them writes its plan, atomically.
        """
        temporary = folder / f".{PLAN}.tmp-{socket.gethostname()}-{os.getpid()}"
        try:
            files.write_bytes(temporary, json.dumps(dataclasses.asdict(self), indent=1).encode())
            files.before_operation("link", folder / PLAN)
            with suppress(FileExistsError):
                os.link(temporary, folder / PLAN)
        except OSError as error:
            if error.errno not in _NO_LINK_ERRNOS or (folder / PLAN).exists():
                raise
            # Without hard links, the plan that is written last remains; every job compares its plan with it afterwards.
            files.rename(temporary, folder / PLAN)
        finally:
            temporary.unlink(missing_ok=True)
        return read_plan(folder)

    def write(self, folder: Path) -> None:
        """Write the plan into the shard folder, replacing an existing plan."""
        files.replace_bytes(folder / PLAN, json.dumps(dataclasses.asdict(self), indent=1).encode())

    def describe_differences(self, earlier: JobPlan) -> list[str]:
        """Describe the differences from ``earlier``."""
        if self.format != earlier.format:
            return ["the parts were written by another version of this tool"]
        descriptions = (
            []
            if self.num_shares == earlier.num_shares
            else [f"the output was divided among {_describe_num_jobs(earlier)}, now {_describe_num_jobs(self)}"]
        )
        descriptions += [
            text
            for text in _describe_changed_values("", earlier.options, self.options)
            if not text.startswith(f"{_SHARE_OPTION} ")
        ]
        descriptions += _describe_changed_values("the tokenizer's ", earlier.tokenizer, self.tokenizer)
        if text := probe.difference(earlier.probe, self.probe):
            descriptions.append(text)
        descriptions += _describe_changed_inputs(earlier.inputs, self.inputs)
        return descriptions if descriptions or self.units == earlier.units else ["the input is split into other units"]


def list_inputs(units: Sequence[Unit]) -> list[tuple[str, int, int]]:
    """Build ``JobPlan.inputs`` for ``units``. Units that divide a file share one entry; standard input has none.

    Raises:
        DataError: a file no longer exists.
    """
    return [_input_entry(path) for unit in units if not unit.start for path in unit.paths if path != STDIN]


def units_digest(units: Sequence[Unit]) -> str:
    """Compute ``JobPlan.units``, a digest that does not depend on the working directory."""
    digest = hashlib.sha256()
    for unit in units:
        paths = [path if path == STDIN else _absolute(path) for path in unit.paths]
        digest.update(json.dumps([unit.format, unit.start, unit.stop, *paths]).encode() + b"\n")
    return digest.hexdigest()


def describe_input_changes(plan: JobPlan, units: Sequence[Unit]) -> str:
    """Describe changes to the input files since the job began; "" if there are none."""
    return _join_first(_describe_changed_inputs(plan.inputs, list_inputs(units)))


def read_plan(folder: Path) -> JobPlan | None:
    """Read the plan for the shards in ``folder``; None if there is no readable plan."""
    try:
        fields = json.loads((folder / PLAN).read_bytes())
        if fields["format"] != FORMAT:
            return JobPlan(inputs=(), units="", options={}, tokenizer={}, format=fields["format"])
        fields["inputs"] = [(str(path), int(size), int(time)) for path, size, time in fields["inputs"]]
        return JobPlan(**fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def check_same_job(plan: JobPlan, earlier: JobPlan, folder: Path) -> None:
    """Check that the shards in ``folder``, which belong to the plan ``earlier``, can be used for ``plan``.

    Raises:
        DataError: the plans differ; the message names the differences.
    """
    if differences := plan.describe_differences(earlier):
        raise DataError(
            f"--resume needs the inputs and options of the interrupted job; {_join_first(differences)}. Restore them, "
            f"or remove --resume to start from scratch, which deletes {folder}."
        )


def _join_first(descriptions: Sequence[str]) -> str:
    """Join the first descriptions for a message, and count the omitted descriptions."""
    return "; ".join(descriptions[:_MAX_LISTED]) + (
        f"; and {len(descriptions) - _MAX_LISTED} more" if len(descriptions) > _MAX_LISTED else ""
    )


def _describe_changed_values(owner: str, earlier: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**earlier, **current} if earlier.get(name) != current.get(name)]
    return [
        f"{owner}{name} was {_format_value(earlier.get(name))}, now {_format_value(current.get(name))}"
        for name in names
    ]


def _format_value(value: object) -> str:
    return shlex.join(value) if isinstance(value, list) else str(value)


def _describe_num_jobs(plan: JobPlan) -> str:
    return f"{plan.num_shares} jobs (--part)" if plan.num_shares else "one job"


def _input_entry(path: str) -> tuple[str, int, int]:
    """Read an input file's (absolute path, size in bytes, modification time in ns)."""
    try:
        return _absolute(path), *object_store.status(path)
    except OSError as error:
        raise DataError(f"--input {path} can no longer be read: {error.strerror}") from error


def _absolute(path: str) -> str:
    return path if object_store.is_remote(path) else os.path.abspath(path)


def _describe_changed_inputs(
    earlier: Sequence[tuple[str, int, int]], current: Sequence[tuple[str, int, int]]
) -> list[str]:
    earlier_paths, current_paths = ([path for path, *_ in inputs] for inputs in (earlier, current))
    earlier_counts, current_counts = Counter(earlier_paths), Counter(current_paths)
    descriptions = (
        ["the order of --input has changed"]
        if earlier_paths != current_paths and earlier_counts == current_counts
        else []
    )
    descriptions += [f"{path} is no longer read" for path in earlier_counts if path not in current_counts]
    descriptions += [f"{path} is new" for path in current_counts if path not in earlier_counts]
    common = [path for path in current_counts if path in earlier_counts]
    descriptions += [
        f"{path} was read {earlier_counts[path]} times, now {current_counts[path]}"
        for path in common
        if earlier_counts[path] != current_counts[path]
    ]
    earlier_entries, current_entries = ({path: entry for path, *entry in inputs} for inputs in (earlier, current))
    return descriptions + [
        _describe_changed_file(path, *earlier_entries[path], *current_entries[path])
        for path in common
        if earlier_entries[path] != current_entries[path]
    ]


def _describe_changed_file(path: str, size: int, time_ns: int, new_size: int, new_time_ns: int) -> str:
    if size != new_size:
        return f"{path} had {size} bytes, now {new_size}"
    return (
        f"{path} is {abs(new_time_ns - time_ns) / 1e9:.1f} s {'newer' if new_time_ns > time_ns else 'older'} "
        "than before"
    )


# Create a job's units and shard folder, or load them to continue an interrupted job.

_MIN_UNIT_BYTES = 4 << 20
_UNITS_PER_WORKER = 8
"""Minimum number of units per worker, unless they would be too small, so that all workers finish at a similar time."""

_WORKERS_PER_MACHINE, _MACHINES_PER_CLUSTER = 8, 8
"""Assumed numbers of workers and machines if they are unknown."""


def check_resumable(job: Job, paths: Sequence[Path | str]) -> None:
    """Check that a job with --resume, --part or --cluster can read its inputs repeatedly.

    Raises:
        DataError: one of these flags is set and the job reads standard input.
    """
    flag = "--part" if job.share else "--cluster" if job.cluster else "--resume" if job.resume else ""
    if flag and STDIN in map(str, paths):
        raise DataError(f"{flag} needs input that can be read again, got - (standard input); write it to a file first")


def open_shards(job: Job, paths: Sequence[Path | str], tokenizer: Tokenizer) -> tuple[JobPlan, list[Unit], ShardFolder]:
    """Open the plan (the saved plan if the job is resumed), the units and the shards for ``job``.

    The caller must hold the shard folder's lock.

    Raises:
        DataError: the shards to resume belong to another job, or an input is invalid.
    """
    folder = shard_folder_path(job.output_prefix)
    earlier = read_plan(folder)
    is_resumed = job.resume and earlier is not None and not job.share
    unit_bytes = job.unit_bytes or _choose_unit_bytes(job, paths, earlier if is_resumed else None)
    units = plan_units(paths, job.format, unit_bytes)
    saved = earlier if is_resumed or job.share else None
    if saved is not None and job.append_eod:
        _reuse_eod(saved, tokenizer, folder)
    requested = JobPlan(
        inputs=list_inputs(units),
        units=units_digest(units),
        options=_plan_options(job, unit_bytes),
        tokenizer=_tokenizer_properties(tokenizer, saved),
        num_units=len(units),
        eod_id=tokenizer.eod_id if job.append_eod else None,
        source=job.source,
        probe=tokenizer.probe,
    )
    shard_folder = make_shard_folder(folder, requested, is_shared=bool(job.share or job.cluster))
    if job.share:
        _check_share(job.share, requested, requested.publish(folder), folder)
        return requested, units, shard_folder
    if is_resumed and earlier is not None:
        check_same_job(requested, earlier, folder)
        if earlier.committed is None or _is_output_complete(job.output_prefix, earlier.committed):
            return earlier, units, shard_folder
        requested.write(folder)
        return requested, units, shard_folder
    _remove_earlier_shards(job, shard_folder, earlier)
    requested.write(folder)
    return requested, units, shard_folder


def make_shard_folder(folder: Path, plan: JobPlan, *, is_shared: bool) -> ShardFolder:
    """Create the ``ShardFolder`` for ``plan`` at ``folder``."""
    dtype = index_format.token_type(plan.tokenizer["size"])
    return ShardFolder(folder, dtype, plan.digest(), is_shared=is_shared)


def _check_share(share: Share, requested: JobPlan, published: JobPlan | None, folder: Path) -> None:
    """Raise DataError unless the plan ``requested`` by this job equals the plan ``published`` in ``folder``."""
    if published is None:
        raise DataError(f"{folder / PLAN} cannot be read. Remove {folder} and run all parts again.")
    if differences := requested.describe_differences(published):
        raise DataError(
            f"--part {share}: {folder} has the parts of a different job; {_join_first(differences)}. Use the same "
            f"inputs and options for all parts, use another --output-prefix, or remove {folder} if it is no longer "
            "needed."
        )


def _choose_unit_bytes(job: Job, paths: Sequence[Path | str], earlier: JobPlan | None) -> int:
    if earlier is not None and isinstance(unit_bytes := earlier.options.get("--unit-bytes"), int):
        return unit_bytes
    total_bytes = sum(object_store.status(path).size for path in paths if str(path) != STDIN)
    num_workers = job.num_workers
    if job.share or job.cluster:  # ignore this machine's cores: all jobs need equal units, and a cluster may grow
        num_workers = _WORKERS_PER_MACHINE * (job.share.num_jobs if job.share else _MACHINES_PER_CLUSTER)
    return min(max(total_bytes // (num_workers * _UNITS_PER_WORKER), _MIN_UNIT_BYTES), UNIT_BYTES)


def _plan_options(job: Job, unit_bytes: int) -> dict[str, object]:
    return {
        "--format": job.format,
        "--json-key": list(job.json_keys),
        "--no-append-eod": not job.append_eod,
        "--max-document-chars": job.max_document_chars,
        "--gigatoken": job.use_gigatoken,
        "--unit-bytes": unit_bytes,
        **({_SHARE_OPTION: job.share.num_jobs} if job.share else {}),
    }


def _is_output_complete(prefix: str, committed: Mapping[str, Any]) -> bool:
    """Check if a finished job's files still exist; otherwise log the reason."""
    try:
        file = IndexedDataset(prefix)
        is_complete = file.sidecar is not None and file.num_tokens == committed["num_tokens"]
        reason = "" if is_complete else "they belong to another job, or have no .meta.json"
    except (DataError, KeyError) as error:
        reason = str(error)
    if reason:
        log.info(f"the files of {prefix} were finished, but are no longer in place ({reason}); creating them again")
    return not reason


def _tokenizer_properties(tokenizer: Tokenizer, saved_plan: JobPlan | None) -> dict[str, object]:
    """Build ``JobPlan.tokenizer``; the identity is copied from ``saved_plan`` if the tokenizer is the same."""
    identity = tokenizer.identity
    saved_identity = saved_plan.tokenizer.get("identity") if saved_plan is not None else None
    if isinstance(saved_identity, str) and is_same(saved_identity, identity):
        identity = saved_identity
    return {"kind": type(tokenizer).__name__, "identity": identity, "size": tokenizer.vocab_size}


def _reuse_eod(saved_plan: JobPlan, tokenizer: Tokenizer, folder: Path) -> None:
    """Make ``tokenizer`` use the finished units' end-of-document token.

    Raises:
        DataError: --eod-token names another token.
    """
    eod_id = saved_plan.eod_id
    if eod_id is None or eod_id == tokenizer.eod_id or (name := tokenizer.name_of(eod_id)) is None:
        return
    if not is_same(str(saved_plan.tokenizer.get("identity")), tokenizer.identity):
        return  # reported when the plans are compared
    if tokenizer.has_given_eod:
        raise DataError(
            f"the documents in {folder} end with {name} (id {eod_id}), but --eod-token is {tokenizer.eod_name} (id "
            f"{tokenizer.eod_id}). Set --eod-token '{name}', or start from scratch without --resume"
        )
    log.info(
        f"documents end with {name} (id {eod_id}), like the finished documents; a new job uses {tokenizer.eod_name}"
    )
    tokenizer.use_eod(name)


def _remove_earlier_shards(job: Job, shard_folder: ShardFolder, earlier: JobPlan | None) -> None:
    if earlier and earlier.num_shares:
        raise DataError(
            f"{shard_folder.folder} contains the parts of jobs with --part. Merge them (tools/merge_data.py --input "
            f"{shard_folder.folder}), use another --output-prefix, or remove the folder if it is no longer needed."
        )
    if job.resume:
        log.info(f"{shard_folder.folder} contains no finished units; --resume starts from the beginning")
    elif any(shard_folder.folder.glob("unit-*.json")) and not (earlier and earlier.committed):
        log.info(
            f"removing the finished units of an earlier job, {shard_folder.folder}; --resume would continue with them"
        )
    shard_folder.remove()


# Disk space: checks before a job, and the message for a full disk.

_MAX_BYTES_PER_TOKEN = 8
"""Upper bound of the bytes of text per token, which few tokenizers reach; yields a lower bound of the disk space."""

_IDX_BYTES_PER_DOCUMENT, _LEN_BYTES_PER_DOCUMENT = 20, 4

_format_bytes = partial(human_bytes, units=("MB", "GB"), digits=1)

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, an exceeded quota and an exceeded file size limit."""


def check_space_for_units(folder: Path, units: Sequence[Unit], itemsize: int) -> None:
    """Check the disk space for the tokens of ``units``, which are stored twice: in the shards and in the ``.bin``.

    Raises:
        DataError: the space is insufficient for any tokenizer.
    """
    num_text_bytes = sum(unit.size for unit in units)
    _check_space(
        folder,
        2 * itemsize * num_text_bytes // _MAX_BYTES_PER_TOKEN,
        f"{num_text_bytes / 1e9:.2f} GB of input need at least",
    )


def check_space_for_output(folder: Path, counts: Counts, itemsize: int) -> None:
    """Check the disk space for the output.

    Raises:
        DataError: the space is insufficient.
    """
    _check_space(folder, estimate_output_bytes(counts, itemsize), "the output of the finished parts needs")


def estimate_output_bytes(counts: Counts, itemsize: int) -> int:
    """Estimate the size of the ``.bin``, the ``.idx`` and their temporary files."""
    bytes_per_document = _IDX_BYTES_PER_DOCUMENT + _LEN_BYTES_PER_DOCUMENT
    return itemsize * counts.num_tokens + bytes_per_document * counts.num_documents


def disk_full_message(error: OSError, folder: Path, counts: Counts, total_bytes: int, itemsize: int) -> str:
    """Describe a full disk: the free space, an estimate of the additional space needed, and the fix.

    Args:
        counts: counts for the data encoded before the disk was full.
        total_bytes: input size.
    """
    if error.errno == errno.EFBIG:
        return f"a file of the output in {folder} is {files.too_large_message()} ({error})"
    text = f"there is no space for the output in {folder} ({error}): {_format_bytes(files.free_bytes(folder))} are free"
    if counts.num_tokens and total_bytes >= counts.num_bytes:
        total_output = estimate_output_bytes(counts, itemsize) * total_bytes / counts.num_bytes
        finished_output = (itemsize * counts.num_tokens) + _LEN_BYTES_PER_DOCUMENT * counts.num_documents
        text += (
            f", about {_format_bytes(2 * total_output - finished_output)} are needed in addition to the finished parts"
        )
    return f"{text}. Free disk space"


def _check_space(folder: Path, num_needed_bytes: int, subject: str) -> None:
    num_free_bytes = files.free_bytes(folder)
    if num_free_bytes < num_needed_bytes:
        raise DataError(
            f"{subject} {_format_bytes(num_needed_bytes)} in {folder}, but {_format_bytes(num_free_bytes)} are free. "
            "Free disk space, or use another --output-prefix."
        )
