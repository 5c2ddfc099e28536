"""What a job reads and how it is cut; going on with one that was cut off; room on the disk."""

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

# What a job is: what it reads, how it encodes and into which units it is cut. Parts of one plan fit no other.

FORMAT = 2
_NAMED = 5
_SHARES = "--part"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """All that the tokens depend on.

    Args:
        inputs: (absolute path, bytes, time of the last change in ns) of each file in order, as often as it is read.
        units: a digest of what each unit reads.
        options: value of each option of the tool that changes tokens or units.
        tokenizer: what is told apart of it, by name.
        committed: the output is in place, and this is what it came to; the parts only wait to be deleted.
        num_units: how many there are.
        eod_id: ends every document, None where nothing does.
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
        """How many jobs with ``--part`` make this output, 0 where it is one without."""
        return int(self.options.get(_SHARES) or 0)

    def digest(self) -> str:
        """Return what tells finished units of this plan from those of another."""
        given = {name: value for name, value in self.options.items() if value is not None}
        parts = [[list(facts) for facts in self.inputs], self.units, given, dict(self.tokenizer)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def publish(self, folder: Path) -> JobPlan | None:
        """Put the plan into the folder unless one is there, and return the one that is there then.

        Of jobs that start at once on several machines one puts it there, whole; None if it cannot be read.
        """
        own = folder / f".{PLAN}.tmp-{socket.gethostname()}-{os.getpid()}"
        try:
            files.write_bytes(own, json.dumps(dataclasses.asdict(self), indent=1).encode())
            files.before_operation("link", folder / PLAN)
            with suppress(FileExistsError):
                os.link(own, folder / PLAN)
        except OSError as error:
            if error.errno not in _NO_LINKS or (folder / PLAN).exists():
                raise
            files.rename(own, folder / PLAN)  # a file system without links: the last of them counts, and all compare
        finally:
            own.unlink(missing_ok=True)
        return read(folder)

    def write(self, folder: Path) -> None:
        """Put the plan into the folder of the parts."""
        files.replace_bytes(folder / PLAN, json.dumps(dataclasses.asdict(self), indent=1).encode())

    def differences(self, earlier: JobPlan) -> list[str]:
        """Return what is not as it was in ``earlier``, each in words."""
        if self.format != earlier.format:
            return ["the parts are those of another version of this tool"]
        found = (
            []
            if self.num_shares == earlier.num_shares
            else [f"the output was of {_number_of_jobs(earlier)}, now of {_number_of_jobs(self)}"]
        )
        found += [text for text in _changed("", earlier.options, self.options) if not text.startswith(f"{_SHARES} ")]
        found += _changed("the tokenizer's ", earlier.tokenizer, self.tokenizer)
        found += _changed_inputs(earlier.inputs, self.inputs)
        return found if found or self.units == earlier.units else ["the input is cut into other units"]


def inputs_of(units: Sequence[Unit]) -> list[tuple[str, int, int]]:
    """Return ``JobPlan.inputs`` of ``units``: a file once for all of its units, a stream not at all.

    Raises:
        DataError: a file is no longer there.
    """
    return [_file_facts(path) for unit in units if not unit.start for path in unit.paths if path != STDIN]


def digest_of(units: Sequence[Unit]) -> str:
    """Return ``JobPlan.units``: another text for other units, wherever the job is started."""
    digest = hashlib.sha256()
    for unit in units:
        paths = [path if path == STDIN else _absolute(path) for path in unit.paths]
        digest.update(json.dumps([unit.format, unit.start, unit.stop, *paths]).encode() + b"\n")
    return digest.hexdigest()


def changes(plan: JobPlan, units: Sequence[Unit]) -> str:
    """Return in what the files are no longer what they were when the job began, "" where they are."""
    return _named(_changed_inputs(plan.inputs, inputs_of(units)))


def read(folder: Path) -> JobPlan | None:
    """Return the plan of the parts in ``folder``, None where there is none that can be read."""
    try:
        fields = json.loads((folder / PLAN).read_bytes())
        if fields["format"] != FORMAT:
            return JobPlan(inputs=(), units="", options={}, tokenizer={}, format=fields["format"])
        fields["inputs"] = [(str(path), int(size), int(time)) for path, size, time in fields["inputs"]]
        return JobPlan(**fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def check_same(plan: JobPlan, earlier: JobPlan, folder: Path) -> None:
    """Check that the parts in ``folder``, made by ``earlier``, are parts of ``plan``.

    Raises:
        DataError: names each difference.
    """
    if found := plan.differences(earlier):
        raise DataError(
            f"--resume needs the job that was cut off; {_named(found)}. Give what was given then, or leave out "
            f"--resume: {folder} is then removed."
        )


def _named(found: Sequence[str]) -> str:
    return "; ".join(found[:_NAMED]) + (f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else "")


def _changed(of: str, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**earlier, **now} if earlier.get(name) != now.get(name)]
    return [f"{of}{name} was {_format_value(earlier.get(name))}, now {_format_value(now.get(name))}" for name in names]


def _format_value(value: object) -> str:
    return shlex.join(value) if isinstance(value, list) else str(value)


def _number_of_jobs(plan: JobPlan) -> str:
    return f"{plan.num_shares} jobs (--part)" if plan.num_shares else "one job"


def _file_facts(path: str) -> tuple[str, int, int]:
    try:
        return _absolute(path), *object_store.status(path)
    except OSError as error:
        raise DataError(f"--input {path} cannot be read any more: {error.strerror}") from error


def _absolute(path: str) -> str:
    return path if object_store.is_remote(path) else os.path.abspath(path)


def _changed_inputs(earlier: Sequence[tuple[str, int, int]], now: Sequence[tuple[str, int, int]]) -> list[str]:
    before, after = ([path for path, *_ in inputs] for inputs in (earlier, now))
    times_before, times_after = Counter(before), Counter(after)
    found = ["the order of --input has changed"] if before != after and times_before == times_after else []
    found += [f"{path} is no longer read" for path in times_before if path not in times_after]
    found += [f"{path} is new" for path in times_after if path not in times_before]
    common = [path for path in times_after if path in times_before]
    found += [
        f"{path} was read {times_before[path]} times, now {times_after[path]}"
        for path in common
        if times_before[path] != times_after[path]
    ]
    facts_before, facts_after = ({path: facts for path, *facts in inputs} for inputs in (earlier, now))
    return found + [
        _difference(path, *facts_before[path], *facts_after[path])
        for path in common
        if facts_before[path] != facts_after[path]
    ]


def _difference(path: str, size: int, time: int, new_size: int, new_time: int) -> str:
    if size != new_size:
        return f"{path} had {size} bytes, now {new_size}"
    return (
        f"{path} was written again {abs(new_time - time) / 1e9:.1f} s {'after' if new_time > time else 'before'} that"
    )


# From what is asked for to units and a folder of parts: a fresh one, or that of the job that was cut off.

_SMALLEST_UNIT = 4 << 20
_UNITS_PER_WORKER = 8
"""So many at least, if they are not too small: the last ones then end at about the same time."""

_WORKERS_OF_A_MACHINE, _MACHINES_OF_A_CLUSTER = 8, 8
"""Reckoned with where nobody knows them."""


def check_resumable(job: Job, paths: Sequence[Path | str]) -> None:
    """Check that a job over ``paths`` can go on with what is finished, if that is asked for.

    Raises:
        DataError: it reads standard input, which cannot be read again.
    """
    flag = "--part" if job.share else "--cluster" if job.cluster else "--resume" if job.resume else ""
    if flag and STDIN in map(str, paths):
        raise DataError(f"{flag} needs input that can be read again, got - (standard input); write it to a file first")


def open_parts(job: Job, paths: Sequence[Path | str], tokenizer: Tokenizer) -> tuple[JobPlan, list[Unit], ShardFolder]:
    """Return the plan of ``job``, or that found if it goes on, its units and its parts. The caller locks them.

    Raises:
        DataError: the parts to go on with belong to another job, or an input cannot be used.
    """
    folder = folder_of(job.output_prefix)
    earlier = read(folder)
    goes_on = job.resume and earlier is not None and not job.share
    unit_bytes = job.unit_bytes or _unit_bytes(job, paths, earlier if goes_on else None)
    units = plan_units(paths, job.format, unit_bytes)
    begun = earlier if goes_on or job.share else None
    if begun is not None and job.append_eod:
        _keep_eod(begun, tokenizer, folder)
    asked = JobPlan(
        inputs=inputs_of(units),
        units=digest_of(units),
        options=_options(job, unit_bytes),
        tokenizer=_tokenizer_facts(tokenizer, begun),
        num_units=len(units),
        eod_id=tokenizer.eod_id if job.append_eod else None,
    )
    parts = folder_for(folder, asked, is_shared=bool(job.share or job.cluster))
    if job.share:
        _check_share(job.share, asked, asked.publish(folder), folder)
        return asked, units, parts
    if goes_on and earlier is not None:
        check_same(asked, earlier, folder)
        if earlier.committed is None or _is_in_place(job.output_prefix, earlier.committed):
            return earlier, units, parts
        asked.write(folder)
        return asked, units, parts
    _remove_earlier(job, parts, earlier)
    asked.write(folder)
    return asked, units, parts


def folder_for(folder: Path, plan: JobPlan, *, is_shared: bool) -> ShardFolder:
    """Return the parts of ``plan`` in ``folder``."""
    dtype = index_format.token_type(plan.tokenizer["size"])
    return ShardFolder(folder, dtype, plan.digest(), is_shared=is_shared)


def _check_share(share: Share, asked: JobPlan, found: JobPlan | None, folder: Path) -> None:
    """Check that the plan in ``folder`` is the one that every other job of ``share.num_jobs`` has made, too."""
    if found is None:
        raise DataError(f"{folder / PLAN} cannot be read. Remove {folder} and run all parts again.")
    if differences := asked.differences(found):
        raise DataError(
            f"--part {share} needs in {folder} what its own jobs have made; {_named(differences)}. Give all parts the "
            f"same inputs and options, give another --output-prefix, or remove {folder} if nobody needs it."
        )


def _unit_bytes(job: Job, paths: Sequence[Path | str], earlier: JobPlan | None) -> int:
    if earlier is not None and isinstance(found := earlier.options.get("--unit-bytes"), int):
        return found
    total = sum(object_store.status(path).size for path in paths if str(path) != STDIN)
    num_workers = job.num_workers
    if job.share or job.cluster:  # not by this machine's cores: all jobs must cut alike, and a cluster may grow
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
    """Return whether the files of a finished job are still there, and say where they are not."""
    try:
        file = IndexedDataset(prefix)
        is_complete = file.sidecar is not None and file.num_tokens == committed["num_tokens"]
        reason = "" if is_complete else "they are those of another job, or without .meta.json"
    except (DataError, KeyError) as error:
        reason = str(error)
    if reason:
        log.info(f"the files of {prefix} were finished, but are no longer in place ({reason}): they are made again")
    return not reason


def _tokenizer_facts(tokenizer: Tokenizer, begun: JobPlan | None) -> dict[str, object]:
    """Return what a plan says of the tokenizer; the identity as in the plan that was begun if it names the same one."""
    identity = tokenizer.identity
    earlier = begun.tokenizer.get("identity") if begun is not None else None
    if isinstance(earlier, str) and is_same(earlier, identity):
        identity = earlier
    return {"kind": type(tokenizer).__name__, "identity": identity, "size": tokenizer.vocab_size}


def _keep_eod(begun: JobPlan, tokenizer: Tokenizer, folder: Path) -> None:
    """End documents with the token of the units that are finished.

    Raises:
        DataError: If --eod-token names another one.
    """
    eod_id = begun.eod_id
    if eod_id is None or eod_id == tokenizer.eod_id or (name := tokenizer.name_of(eod_id)) is None:
        return
    if not is_same(str(begun.tokenizer.get("identity")), tokenizer.identity):
        return  # reported by the comparison of both plans
    if tokenizer.has_given_eod:
        raise DataError(
            f"the documents in {folder} end with {name} (id {eod_id}), but --eod-token is {tokenizer.eod_name} (id "
            f"{tokenizer.eod_id}). Give --eod-token '{name}', or start again without --resume"
        )
    log.info(
        f"documents end with {name} (id {eod_id}), as those that are finished; a new job takes {tokenizer.eod_name}"
    )
    tokenizer.use_eod(name)


def _remove_earlier(job: Job, parts: ShardFolder, earlier: JobPlan | None) -> None:
    if earlier and earlier.num_shares:
        raise DataError(
            f"{parts.folder} holds what jobs with --part have made. Join it (tools/merge_data.py --input "
            f"{parts.folder}), give another --output-prefix, or remove it if nobody needs it."
        )
    if job.resume:
        log.info(f"{parts.folder} holds no finished units: --resume starts from the beginning")
    elif any(parts.folder.glob("unit-*.json")) and not (earlier and earlier.committed):
        log.info(f"removing the finished units of an earlier job, {parts.folder}; --resume would go on with them")
    parts.remove()


# Whether the disk has room, before and after it turns out that it has none.

_BYTES_PER_TOKEN_AT_MOST = 8
"""Bytes of text that a token stands for; few tokenizers reach it, so less room than that is never enough."""

_IDX_BYTES_PER_DOCUMENT, _LEN_BYTES_PER_DOCUMENT = 20, 4

_megabytes = partial(human_bytes, units=("MB", "GB"), digits=1)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, a used up quota, a limit on the size of files."""


def check_for_units(folder: Path, units: Sequence[Unit], itemsize: int) -> None:
    """Check that there may be room for the tokens of ``units``, twice: as parts and in the ``.bin`` made of them.

    Raises:
        DataError: there is not, whatever the tokenizer.
    """
    text = sum(unit.size for unit in units)
    _check(folder, 2 * itemsize * text // _BYTES_PER_TOKEN_AT_MOST, f"{text / 1e9:.2f} GB of input need at least")


def check_for_output(folder: Path, counts: Counts, itemsize: int) -> None:
    """Check that there is room for the output that is made of all parts.

    Raises:
        DataError: there is not.
    """
    _check(folder, output_bytes(counts, itemsize), "the output made of the finished parts needs")


def output_bytes(counts: Counts, itemsize: int) -> int:
    """Return the size of ``.bin`` and ``.idx``, and of what is written on the way to them."""
    per_document = _IDX_BYTES_PER_DOCUMENT + _LEN_BYTES_PER_DOCUMENT
    return itemsize * counts.num_tokens + per_document * counts.num_documents


def in_words(error: OSError, folder: Path, counts: Counts, total_bytes: int, itemsize: int) -> str:
    """Return what a full disk means for the job: what is free, about how much more is needed, and what to do.

    Args:
        counts: what was encoded before the disk was full.
        total_bytes: of the whole input.
    """
    if error.errno == errno.EFBIG:
        return f"a file of the output in {folder} is {files.too_large_message()} ({error})"
    text = f"there is no room for the output in {folder} ({error}): {_megabytes(files.free_bytes(folder))} are free"
    if counts.num_tokens and total_bytes >= counts.num_bytes:
        whole = output_bytes(counts, itemsize) * total_bytes / counts.num_bytes
        done = (itemsize * counts.num_tokens) + _LEN_BYTES_PER_DOCUMENT * counts.num_documents
        text += f", about {_megabytes(2 * whole - done)} are needed beyond the finished parts"
    return f"{text}. Make room"


def _check(folder: Path, needed: int, what: str) -> None:
    free = files.free_bytes(folder)
    if free < needed:
        raise DataError(
            f"{what} {_megabytes(needed)} in {folder}, {_megabytes(free)} are free. Make room, or give another "
            "--output-prefix."
        )
