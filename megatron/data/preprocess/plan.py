"""The plan of a job (its inputs, units and options), resuming an interrupted job, and checks of the disk space."""

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
from megatron.data.preprocess.shards import PLAN, ShardFolder, folder_of
from megatron.errors import DataError
from megatron.log import human_bytes
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.identity import is_same

# The identity of a job: its inputs, its encoding options and its units. Parts can only be used with their own plan.

FORMAT = 2
_NAMED = 5
_SHARES = "--part"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """Everything that determines the tokens of a job.

    Args:
        inputs: (absolute path, bytes, modification time in ns) of each file in order; a file that is read twice has two
            entries.
        units: digest of the paths, formats and ranges of all units.
        options: values of the tool's options that affect the tokens or the units.
        tokenizer: properties that identify the tokenizer, by name.
        committed: summary of the job if its output files are in place and only the parts remain to be deleted; else
            None.
        num_units: number of units.
        eod_id: id of the token that ends every document; None if there is none.
    """

    inputs: Sequence[tuple[str, int, int]]
    units: str
    options: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    committed: Mapping[str, Any] | None = None
    format: int = FORMAT
    num_units: int = 0
    eod_id: int | None = None

    @property
    def num_shares(self) -> int:
        """Number of jobs with ``--part`` that produce the output; 0 for a single job without ``--part``."""
        return int(self.options.get(_SHARES) or 0)

    def digest(self) -> str:
        """Return a digest that identifies the finished units of this plan."""
        set_options = {name: value for name, value in self.options.items() if value is not None}
        parts = [[list(facts) for facts in self.inputs], self.units, set_options, dict(self.tokenizer)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def publish(self, folder: Path) -> JobPlan | None:
        """Write the plan into the folder unless it has one, and return the folder's plan; None if it is unreadable.

        If jobs start simultaneously on several machines, exactly one of them writes its plan, atomically.
        """
        temporary = folder / f".{PLAN}.tmp-{socket.gethostname()}-{os.getpid()}"
        try:
            files.write_bytes(temporary, json.dumps(dataclasses.asdict(self), indent=1).encode())
            files.before_operation("link", folder / PLAN)
            with suppress(FileExistsError):
                os.link(temporary, folder / PLAN)
        except OSError as error:
            if error.errno not in _NO_LINKS or (folder / PLAN).exists():
                raise
            # Without hard links, the plan that is written last remains; every job compares its plan with it afterwards.
            files.rename(temporary, folder / PLAN)
        finally:
            temporary.unlink(missing_ok=True)
        return read(folder)

    def write(self, folder: Path) -> None:
        """Write the plan into the folder of the parts, replacing an existing plan."""
        files.replace_bytes(folder / PLAN, json.dumps(dataclasses.asdict(self), indent=1).encode())

    def differences(self, earlier: JobPlan) -> list[str]:
        """Return descriptions of the differences from ``earlier``."""
        if self.format != earlier.format:
            return ["the parts were written by another version of this tool"]
        descriptions = (
            []
            if self.num_shares == earlier.num_shares
            else [f"the output was divided among {_number_of_jobs(earlier)}, now {_number_of_jobs(self)}"]
        )
        descriptions += [
            text for text in _changed("", earlier.options, self.options) if not text.startswith(f"{_SHARES} ")
        ]
        descriptions += _changed("the tokenizer's ", earlier.tokenizer, self.tokenizer)
        descriptions += _changed_inputs(earlier.inputs, self.inputs)
        return descriptions if descriptions or self.units == earlier.units else ["the input is split into other units"]


def inputs_of(units: Sequence[Unit]) -> list[tuple[str, int, int]]:
    """Return ``JobPlan.inputs`` for ``units``. The units that divide a file share one entry; standard input has none.

    Raises:
        DataError: a file no longer exists.
    """
    return [_file_facts(path) for unit in units if not unit.start for path in unit.paths if path != STDIN]


def digest_of(units: Sequence[Unit]) -> str:
    """Return ``JobPlan.units``, a digest of the units that does not depend on the working directory."""
    digest = hashlib.sha256()
    for unit in units:
        paths = [path if path == STDIN else _absolute(path) for path in unit.paths]
        digest.update(json.dumps([unit.format, unit.start, unit.stop, *paths]).encode() + b"\n")
    return digest.hexdigest()


def changes(plan: JobPlan, units: Sequence[Unit]) -> str:
    """Describe the changes of the input files since the job began; "" if there are none."""
    return _named(_changed_inputs(plan.inputs, inputs_of(units)))


def read(folder: Path) -> JobPlan | None:
    """Return the plan of the parts in ``folder``; None if there is no readable plan."""
    try:
        fields = json.loads((folder / PLAN).read_bytes())
        if fields["format"] != FORMAT:
            return JobPlan(inputs=(), units="", options={}, tokenizer={}, format=fields["format"])
        fields["inputs"] = [(str(path), int(size), int(time)) for path, size, time in fields["inputs"]]
        return JobPlan(**fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def check_same(plan: JobPlan, earlier: JobPlan, folder: Path) -> None:
    """Check that the parts in ``folder``, which belong to the plan ``earlier``, can be used for ``plan``.

    Raises:
        DataError: the plans differ; the message names the differences.
    """
    if differences := plan.differences(earlier):
        raise DataError(
            f"--resume needs the inputs and options of the interrupted job; {_named(differences)}. Restore them, or "
            f"remove --resume to start from scratch, which deletes {folder}."
        )


def _named(found: Sequence[str]) -> str:
    """Join the first descriptions for a message, and add the number of omitted descriptions."""
    return "; ".join(found[:_NAMED]) + (f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else "")


def _changed(of: str, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**earlier, **now} if earlier.get(name) != now.get(name)]
    return [f"{of}{name} was {_format_value(earlier.get(name))}, now {_format_value(now.get(name))}" for name in names]


def _format_value(value: object) -> str:
    return shlex.join(value) if isinstance(value, list) else str(value)


def _number_of_jobs(plan: JobPlan) -> str:
    return f"{plan.num_shares} jobs (--part)" if plan.num_shares else "one job"


def _file_facts(path: str) -> tuple[str, int, int]:
    """Return (absolute path, size in bytes, modification time in ns) of an input file."""
    try:
        return _absolute(path), *object_store.status(path)
    except OSError as error:
        raise DataError(f"--input {path} can no longer be read: {error.strerror}") from error


def _absolute(path: str) -> str:
    return path if object_store.is_remote(path) else os.path.abspath(path)


def _changed_inputs(earlier: Sequence[tuple[str, int, int]], now: Sequence[tuple[str, int, int]]) -> list[str]:
    before, after = ([path for path, *_ in inputs] for inputs in (earlier, now))
    times_before, times_after = Counter(before), Counter(after)
    descriptions = ["the order of --input has changed"] if before != after and times_before == times_after else []
    descriptions += [f"{path} is no longer read" for path in times_before if path not in times_after]
    descriptions += [f"{path} is new" for path in times_after if path not in times_before]
    common = [path for path in times_after if path in times_before]
    descriptions += [
        f"{path} was read {times_before[path]} times, now {times_after[path]}"
        for path in common
        if times_before[path] != times_after[path]
    ]
    facts_before, facts_after = ({path: facts for path, *facts in inputs} for inputs in (earlier, now))
    return descriptions + [
        _difference(path, *facts_before[path], *facts_after[path])
        for path in common
        if facts_before[path] != facts_after[path]
    ]


def _difference(path: str, size: int, time: int, new_size: int, new_time: int) -> str:
    if size != new_size:
        return f"{path} had {size} bytes, now {new_size}"
    return f"{path} is {abs(new_time - time) / 1e9:.1f} s {'newer' if new_time > time else 'older'} than before"


# Create the units and the folder of parts of a job, or load them to continue an interrupted job.

_SMALLEST_UNIT = 4 << 20
_UNITS_PER_WORKER = 8
"""Minimum number of units per worker, unless they would be too small, so that all workers finish at a similar time."""

_WORKERS_OF_A_MACHINE, _MACHINES_OF_A_CLUSTER = 8, 8
"""Assumed numbers of workers and machines if they are unknown."""


def check_resumable(job: Job, paths: Sequence[Path | str]) -> None:
    """Check that the inputs of a job with --resume, --part or --cluster can be read repeatedly.

    Raises:
        DataError: one of these flags is set and the job reads standard input.
    """
    flag = "--part" if job.share else "--cluster" if job.cluster else "--resume" if job.resume else ""
    if flag and STDIN in map(str, paths):
        raise DataError(f"{flag} needs input that can be read again, got - (standard input); write it to a file first")


def open_parts(job: Job, paths: Sequence[Path | str], tokenizer: Tokenizer) -> tuple[JobPlan, list[Unit], ShardFolder]:
    """Return the plan (the saved one if the job is resumed), the units and the parts of ``job``.

    The caller must hold the lock of the folder of parts.

    Raises:
        DataError: the parts to resume belong to another job, or an input is invalid.
    """
    folder = folder_of(job.output_prefix)
    earlier = read(folder)
    resumes = job.resume and earlier is not None and not job.share
    unit_bytes = job.unit_bytes or _unit_bytes(job, paths, earlier if resumes else None)
    units = plan_units(paths, job.format, unit_bytes)
    saved = earlier if resumes or job.share else None
    if saved is not None and job.append_eod:
        _keep_eod(saved, tokenizer, folder)
    requested = JobPlan(
        inputs=inputs_of(units),
        units=digest_of(units),
        options=_options(job, unit_bytes),
        tokenizer=_tokenizer_facts(tokenizer, saved),
        num_units=len(units),
        eod_id=tokenizer.eod_id if job.append_eod else None,
    )
    parts = folder_for(folder, requested, is_shared=bool(job.share or job.cluster))
    if job.share:
        _check_share(job.share, requested, requested.publish(folder), folder)
        return requested, units, parts
    if resumes and earlier is not None:
        check_same(requested, earlier, folder)
        if earlier.committed is None or _is_in_place(job.output_prefix, earlier.committed):
            return earlier, units, parts
        requested.write(folder)
        return requested, units, parts
    _remove_earlier(job, parts, earlier)
    requested.write(folder)
    return requested, units, parts


def folder_for(folder: Path, plan: JobPlan, *, is_shared: bool) -> ShardFolder:
    """Return the ``ShardFolder`` of ``plan`` at ``folder``."""
    dtype = index_format.token_type(plan.tokenizer["size"])
    return ShardFolder(folder, dtype, plan.digest(), is_shared=is_shared)


def _check_share(share: Share, asked: JobPlan, found: JobPlan | None, folder: Path) -> None:
    """Check that the plan ``asked`` of this job equals the plan ``found`` in ``folder``, which all shares must have."""
    if found is None:
        raise DataError(f"{folder / PLAN} cannot be read. Remove {folder} and run all parts again.")
    if differences := asked.differences(found):
        raise DataError(
            f"--part {share}: {folder} has the parts of a different job; {_named(differences)}. Use the same inputs "
            f"and options for all parts, use another --output-prefix, or remove {folder} if it is no longer needed."
        )


def _unit_bytes(job: Job, paths: Sequence[Path | str], earlier: JobPlan | None) -> int:
    if earlier is not None and isinstance(unit_bytes := earlier.options.get("--unit-bytes"), int):
        return unit_bytes
    total = sum(object_store.status(path).size for path in paths if str(path) != STDIN)
    num_workers = job.num_workers
    if job.share or job.cluster:  # ignore this machine's cores: all jobs need equal units, and a cluster may grow
        num_workers = _WORKERS_OF_A_MACHINE * (job.share.num_jobs if job.share else _MACHINES_OF_A_CLUSTER)
    return min(max(total // (num_workers * _UNITS_PER_WORKER), _SMALLEST_UNIT), UNIT_BYTES)


def _options(job: Job, unit_bytes: int) -> dict[str, object]:
    return {
        "--format": job.format,
        "--json-key": list(job.json_keys),
        "--no-append-eod": not job.append_eod,
        "--max-document-chars": job.max_document_chars,
        "--gigatoken": job.use_gigatoken,
        "--unit-bytes": unit_bytes,
        **({_SHARES: job.share.num_jobs} if job.share else {}),
    }


def _is_in_place(prefix: str, committed: Mapping[str, Any]) -> bool:
    """Return True if the files of a finished job still exist; otherwise log the reason."""
    try:
        file = IndexedDataset(prefix)
        is_complete = file.sidecar is not None and file.num_tokens == committed["num_tokens"]
        reason = "" if is_complete else "they belong to another job, or have no .meta.json"
    except (DataError, KeyError) as error:
        reason = str(error)
    if reason:
        log.info(f"the files of {prefix} were finished, but are no longer in place ({reason}); creating them again")
    return not reason


def _tokenizer_facts(tokenizer: Tokenizer, begun: JobPlan | None) -> dict[str, object]:
    """Return ``JobPlan.tokenizer``; if the tokenizer is the same as in ``begun``, the identity is copied from there."""
    identity = tokenizer.identity
    earlier = begun.tokenizer.get("identity") if begun is not None else None
    if isinstance(earlier, str) and is_same(earlier, identity):
        identity = earlier
    return {"kind": type(tokenizer).__name__, "identity": identity, "size": tokenizer.vocab_size}


def _keep_eod(begun: JobPlan, tokenizer: Tokenizer, folder: Path) -> None:
    """Make ``tokenizer`` use the end-of-document token of the finished units.

    Raises:
        DataError: --eod-token names another token.
    """
    eod_id = begun.eod_id
    if eod_id is None or eod_id == tokenizer.eod_id or (name := tokenizer.name_of(eod_id)) is None:
        return
    if not is_same(str(begun.tokenizer.get("identity")), tokenizer.identity):
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


def _remove_earlier(job: Job, parts: ShardFolder, earlier: JobPlan | None) -> None:
    if earlier and earlier.num_shares:
        raise DataError(
            f"{parts.folder} contains the parts of jobs with --part. Merge them (tools/merge_data.py --input "
            f"{parts.folder}), use another --output-prefix, or remove the folder if it is no longer needed."
        )
    if job.resume:
        log.info(f"{parts.folder} contains no finished units; --resume starts from the beginning")
    elif any(parts.folder.glob("unit-*.json")) and not (earlier and earlier.committed):
        log.info(f"removing the finished units of an earlier job, {parts.folder}; --resume would continue with them")
    parts.remove()


# Disk space: checks before a job, and the message for a full disk.

_BYTES_PER_TOKEN_AT_MOST = 8
"""Upper bound of the bytes of text per token, which few tokenizers reach; yields a lower bound of the disk space."""

_IDX_BYTES_PER_DOCUMENT, _LEN_BYTES_PER_DOCUMENT = 20, 4

_megabytes = partial(human_bytes, units=("MB", "GB"), digits=1)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, an exceeded quota and an exceeded file size limit."""


def check_for_units(folder: Path, units: Sequence[Unit], itemsize: int) -> None:
    """Check the disk space for the tokens of ``units``, which are stored twice: in the parts and in the ``.bin``.

    Raises:
        DataError: the space is insufficient for any tokenizer.
    """
    text = sum(unit.size for unit in units)
    _check(folder, 2 * itemsize * text // _BYTES_PER_TOKEN_AT_MOST, f"{text / 1e9:.2f} GB of input need at least")


def check_for_output(folder: Path, counts: Counts, itemsize: int) -> None:
    """Check the disk space for the output.

    Raises:
        DataError: the space is insufficient.
    """
    _check(folder, output_bytes(counts, itemsize), "the output of the finished parts needs")


def output_bytes(counts: Counts, itemsize: int) -> int:
    """Return the size of the ``.bin``, the ``.idx`` and their temporary files."""
    bytes_per_document = _IDX_BYTES_PER_DOCUMENT + _LEN_BYTES_PER_DOCUMENT
    return itemsize * counts.num_tokens + bytes_per_document * counts.num_documents


def in_words(error: OSError, folder: Path, counts: Counts, total_bytes: int, itemsize: int) -> str:
    """Return the message for a full disk: the free space, an estimate of the additional space needed, and the fix.

    Args:
        counts: counts of the data encoded before the disk was full.
        total_bytes: size of the input.
    """
    if error.errno == errno.EFBIG:
        return f"a file of the output in {folder} is {files.too_large_message()} ({error})"
    text = f"there is no space for the output in {folder} ({error}): {_megabytes(files.free_bytes(folder))} are free"
    if counts.num_tokens and total_bytes >= counts.num_bytes:
        total_output = output_bytes(counts, itemsize) * total_bytes / counts.num_bytes
        finished_output = (itemsize * counts.num_tokens) + _LEN_BYTES_PER_DOCUMENT * counts.num_documents
        text += f", about {_megabytes(2 * total_output - finished_output)} are needed in addition to the finished parts"
    return f"{text}. Free disk space"


def _check(folder: Path, needed: int, what: str) -> None:
    free = files.free_bytes(folder)
    if free < needed:
        raise DataError(
            f"{what} {_megabytes(needed)} in {folder}, but {_megabytes(free)} are free. Free disk space, or use "
            "another --output-prefix."
        )
