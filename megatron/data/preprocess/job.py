"""A preprocessing job: workers encode units into shards, which are merged; the output files appear together."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megatron import files, log
from megatron.data import token_upload
from megatron.data.file_io import read_lengths
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder, check_prefix
from megatron.data.preprocess import plan, shards
from megatron.data.preprocess.cluster import ClusterWorkers
from megatron.data.preprocess.corpus import find_inputs, read_unit
from megatron.data.preprocess.encode import Encoder, parse
from megatron.data.preprocess.job_types import (
    STDIN,
    TABLES,
    BadRecord,
    Counts,
    Job,
    Share,
    Summary,
    Unit,
    sum_counts,
)
from megatron.data.preprocess.plan import JobPlan
from megatron.data.preprocess.progress import ErrorLimits, JobProgress, TooManyBadRecords, progress
from megatron.data.preprocess.shards import LOCK, Shard, ShardFolder, shard_folder_path
from megatron.data.preprocess.share import check_complete
from megatron.data.preprocess.workers import UnitError, Work, Workers
from megatron.errors import DataError, StopRequest
from megatron.file_lock import FileLock
from megatron.tokenizer import Tokenizer, with_gigatoken

# Faster BPE with ``gigatoken``, used if it returns the same ids on a corpus sample.

_MAX_SAMPLED_UNITS = 16
_SAMPLE_DIVISOR = 128
_MIN_CHARS, _MAX_CHARS = 1 << 12, 1 << 15  # per sampled unit


def fast_tokenizer(tokenizer: Tokenizer, units: Sequence[Unit], keys: Sequence[str]) -> Tokenizer:
    """Replace ``tokenizer`` by a faster version; if its ids differ on a sample, warn and return ``tokenizer``.

    Raises:
        DataError: gigatoken is not installed, the tokenizer is not a BPE, or the corpus is standard input, which
            cannot be sampled.
    """
    if any(unit.path == STDIN for unit in units):
        raise DataError("--gigatoken needs a sample of the corpus, which cannot be read from - (standard input)")
    return with_gigatoken(tokenizer, sample_texts(units, keys), is_required=True)


def sample_texts(units: Sequence[Unit], keys: Sequence[str]) -> list[str]:
    """Sample texts from the beginnings of up to 16 evenly spaced units: 1/128 of the corpus, at most 512 kB."""
    num_sampled_units = min(_MAX_SAMPLED_UNITS, len(units))
    share = sum(unit.size for unit in units) // (_SAMPLE_DIVISOR * max(num_sampled_units, 1))
    num_chars = min(max(share, _MIN_CHARS), _MAX_CHARS)
    return [
        text
        for idx in range(num_sampled_units)
        for text in _first_chars(units[idx * len(units) // num_sampled_units], keys, num_chars)
    ]


def _first_chars(unit: Unit, keys: Sequence[str], num_chars: int) -> Iterator[str]:
    remaining = num_chars
    for text in _texts(unit, keys):
        yield text[:remaining]
        remaining -= len(text)
        if remaining <= 0:
            return


def _texts(unit: Unit, keys: Sequence[str]) -> Iterator[str]:
    """Read the texts in the unit's usable records."""
    for record in read_unit(unit, keys):
        parsed = parse(record, keys if unit.format in ("jsonl", *TABLES) else None)
        yield from () if isinstance(parsed, BadRecord) else parsed


# The lock that limits an output prefix to one job at a time.

LOCK_TIMEOUT_S = 2.0
"""Time to wait for the lock, because the workers of a killed job end shortly after it."""


@contextmanager
def lock_folder(folder: Path, share: Share | None = None) -> Iterator[None]:
    """Lock ``folder`` for this process and its forked children; create it if needed, and remove it if empty at exit.

    The lock is released when the last of these processes ends, for any reason.

    Args:
        share: lock only this share of the folder; None: the whole folder.

    Raises:
        DataError: another process holds the lock.
    """
    target = f"part {share} of {folder.with_suffix('')}" if share else folder.with_suffix("")

    def describe_holder(holder: bytes) -> str:
        return (
            f"only one job at a time may write {target}; process "
            f"{holder.decode('ascii', 'replace').strip() or 'unknown'} is writing it. Wait for it, stop it, or use "
            f"another {'--part' if share else '--output-prefix'}."
        )

    def warn_unlocked(error: OSError, _: bytes) -> bool:
        log.warning(f"{folder} cannot be locked ({error}); make sure that no other job writes the same --output-prefix")
        return True

    lock = FileLock(
        folder / (f"{share.suffix}.lock" if share else LOCK),
        "flock",
        wait_s=lambda _: LOCK_TIMEOUT_S,
        describe=describe_holder,
        error=DataError,
        without_lock=warn_unlocked,
    )
    with suppress(OSError):  # may fail on a full disk; the pid is only used in another job's message
        lock.write(f"{os.getpid()}{f' on {socket.gethostname()}' if share else ''}\n".encode())
    try:
        yield
    finally:
        if share is None:
            _remove_if_empty(folder)
        lock.release(removes_file=share is not None)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        if os.listdir(folder) == [LOCK]:
            files.remove_file(folder / LOCK)
            files.before_operation("remove_folder", folder)
            folder.rmdir()


# Shards are concatenated in unit order; the result does not depend on which process encoded them.


def merge(
    writer: IndexedDatasetBuilder,
    shard_folder: ShardFolder,
    finished_shards: Sequence[Shard],
    on_bytes: Callable[[int], None],
) -> None:
    """Write ``finished_shards`` to ``writer``; call ``on_bytes`` with the token bytes written so far."""
    num_written_bytes = 0
    with writer:
        for shard in finished_shards:
            size, crc32 = shard.file_stats["bin"]
            writer.append(
                shard_folder.path(shard.unit, "bin"),
                read_lengths(shard_folder.path(shard.unit, "len")),
                num_tokens=shard.counts.num_tokens,
                max_token_id=shard.counts.max_token_id,
                crc32=crc32,
            )
            num_written_bytes += size
            on_bytes(num_written_bytes)


# A complete preprocessing job: from a corpus to a pair of token files.
#
# plan -> worker processes encode units into shards -> shards are concatenated -> all files are renamed together.
# A job with a share stops after its shards are encoded; ``join`` runs the other steps when all shares are complete.


def run(job: Job) -> Summary:
    """Run the job. The output files appear together at the end; with ``job.share`` only its shards are written.

    Raises:
        DataError: an input is invalid, has too many bad records or no documents, the disk is full, or another job
            writes the same files.
        UnitError: a worker process failed or died.
        StopRequest: the job was stopped by Ctrl-C or by a StopRequest; finished units are retained for ``resume``.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of the library do not survive a fork
    check_prefix(job.output_prefix)
    if job.upload_to and not job.share:
        token_upload.check_target(job.upload_to)
    paths = find_inputs(job.inputs)
    plan.check_resumable(job, paths)
    tokenizer = job.make_tokenizer()
    if job.append_eod:
        tokenizer.eod_id  # noqa: B018 - raises before any work is done if the vocabulary has none
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(shard_folder_path(job.output_prefix), job.share))
            job_plan, units, shard_folder = plan.open_shards(job, paths, tokenizer)
        except OSError as error:
            raise DataError(f"--output-prefix {job.output_prefix} cannot be written: {error}") from error
        if job.share:
            return _run_share(job, job.share, tokenizer, shard_folder, units, job_plan)
        if job_plan.committed is None:
            job_progress = JobProgress(units)
            with _explain_errors(job, shard_folder, job_progress):
                _encode_units(job, tokenizer, shard_folder, job_progress)
                job_plan = _finish_job(job, shard_folder, job_progress, job_plan)
        else:
            log.info(f"{job.output_prefix}.bin is already finished")
        if job.upload_to:
            _upload(job.output_prefix, job.upload_to)
        shard_folder.remove()
        return Summary(**(job_plan.committed or {}))


def _run_share(
    job: Job, share: Share, tokenizer: Tokenizer, shard_folder: ShardFolder, units: Sequence[Unit], saved_plan: JobPlan
) -> Summary:
    """Encode the unfinished units in ``share``; other jobs may encode their shares in the same folder."""
    job_progress = JobProgress([unit for unit in units if share.owns(unit.idx)])
    with _explain_errors(job, shard_folder, job_progress):
        _encode_units(job, tokenizer, shard_folder, job_progress, corpus=units)
        if changes := plan.describe_input_changes(saved_plan, units):
            for unit_idx in job_progress.units:
                shard_folder.path(unit_idx, "json").unlink(missing_ok=True)
            raise DataError(f"the input must not change until all parts are finished; {changes}. Run all parts again.")
    # Delete an earlier run's list with too many bad records; ``join`` lists the accepted bad records.
    with suppress(FileNotFoundError):
        files.remove_file(shards.bad_records_path(_bad_prefix(job)))
    return job_progress.summary(None)


def _upload(prefix: str, target: str) -> None:
    """Upload the finished output; the shards are deleted later, so that ``resume`` can retry a failed upload."""
    try:
        token_upload.upload(prefix, target)
    except DataError as error:
        raise DataError(f"{error} Run again with --resume to retry the upload.") from error


def _bad_prefix(job: Job) -> str:
    return f"{job.output_prefix}.{job.share.suffix}" if job.share else job.output_prefix


def _encode_units(
    job: Job,
    tokenizer: Tokenizer,
    shard_folder: ShardFolder,
    job_progress: JobProgress,
    corpus: Sequence[Unit] | None = None,
) -> None:
    """Encode the unfinished units in ``job_progress``.

    Args:
        corpus: all corpus units, which provide the sample for verifying ``gigatoken``; None: the units in
            ``job_progress``.
    """
    units = list(job_progress.units.values())
    unfinished_units = [unit for unit in units if not shard_folder.path(unit.idx, "json").exists()]
    for unit_idx, paths in shard_folder.unfinished_files().items():
        if unit_idx in job_progress.units:
            for path in paths:
                path.unlink(missing_ok=True)
    plan.check_space_for_units(shard_folder.folder, unfinished_units, shard_folder.dtype.itemsize)
    if job.use_gigatoken:
        tokenizer = fast_tokenizer(tokenizer, units if corpus is None else corpus, job.json_keys)
    encoder = Encoder(tokenizer, tuple(job.json_keys), job.append_eod, job.max_document_chars)
    limits = ErrorLimits(job.max_bad_lines, job.max_bad_fraction)
    finished_bytes = job_progress.total_bytes - sum(unit.size for unit in unfinished_units)
    try:
        with (
            _make_workers(job, Work(job_progress.units, encoder, shard_folder)) as workers,
            progress("encoding", job_progress.total_bytes, finished_bytes) as update,
        ):

            def on_report(running: Mapping[int, Counts]) -> None:
                counts = sum_counts((job_progress.counts, *running.values()))
                if not job.reports_all_bad:
                    limits.check(counts, job_progress.max_records(running, counts))
                update(job_progress.num_done_bytes(running), job_progress.format_status(counts))

            job_progress.begin()
            workers.encode(list(job_progress.units), on_report, job_progress.add)
        limits.check(job_progress.counts, job_progress.counts.num_records)
    except TooManyBadRecords as error:
        examples = shards.collect_bad_records(_bad_prefix(job), shard_folder, job_progress.units)
        message = _append_bad_lines(str(error), examples, _bad_prefix(job))
        raise DataError(f"{message}. Correct them, or raise the limit to skip them.") from None


def _append_bad_lines(problem: str, examples: Sequence[str], prefix: str) -> str:
    """Append the first bad lines and the complete list's path to ``problem``."""
    lines = "\n".join(f"  {text}" for text in examples)
    return f"{problem}:\n{lines}\nThe complete list is in {shards.bad_records_path(prefix)}"


def _make_workers(job: Job, work: Work) -> Workers | ClusterWorkers:
    if job.cluster:
        return ClusterWorkers(work, job.cluster, job.num_workers)
    return Workers(work, min(job.num_workers, len(work.units)))


def _finish_job(job: Job, shard_folder: ShardFolder, job_progress: JobProgress, saved_plan: JobPlan) -> JobPlan:
    """Write the output files; return the plan with the job's summary."""
    if changes := plan.describe_input_changes(saved_plan, list(job_progress.units.values())):
        shard_folder.remove()  # they were encoded from a former input version
        raise DataError(f"the input must not change while it is read; {changes}. Run again when it is stable.")
    if not job_progress.counts.num_documents:
        examples = shards.collect_bad_records(job.output_prefix, shard_folder, job_progress.units)
        names = ", ".join(map(str, job.inputs))
        shard_folder.remove()
        problem = f"no documents in {names} ({job_progress.counts.num_empty} empty, {job_progress.counts.num_bad} bad)"
        raise DataError(
            f"{_append_bad_lines(problem, examples, job.output_prefix)}. Correct them." if examples else problem
        )
    bad_path = _write_output(job.output_prefix, saved_plan, shard_folder, job_progress.shards(), job_progress.counts)
    finished_plan = dataclasses.replace(saved_plan, committed=dataclasses.asdict(job_progress.summary(bad_path)))
    finished_plan.write(shard_folder.folder)
    return finished_plan


def _write_output(
    prefix: str, job_plan: JobPlan, shard_folder: ShardFolder, finished_shards: Sequence[Shard], counts: Counts
) -> str | None:
    """Merge ``finished_shards`` into the output files; return the bad record list's path, if any."""
    examples = shards.collect_bad_records(prefix, shard_folder, [shard.unit for shard in finished_shards])
    plan.check_space_for_output(Path(prefix).absolute().parent, counts, shard_folder.dtype.itemsize)
    writer = IndexedDatasetBuilder(
        prefix,
        vocab_size=job_plan.tokenizer["size"],
        tokenizer=job_plan.tokenizer["identity"],
        eod_id=job_plan.eod_id,
        source=job_plan.source,
        probe=job_plan.probe,
    )
    with progress("joining", counts.num_tokens * shard_folder.dtype.itemsize) as update:
        merge(writer, shard_folder, finished_shards, lambda done: update(done, f"{done / 1e6:.0f} MB"))
    return str(shards.bad_records_path(prefix)) if examples else None


def join(folder: Path, prefix: str) -> Summary:
    """Merge the shards in ``folder``, written by jobs with ``--part``, into the output that a single job would write.

    Each shard is verified before it is used. The shards are not deleted.

    Raises:
        DataError: shards are missing, damaged or from another job (the message names all), or there is no document.
    """
    check_prefix(prefix)
    start_s = time.monotonic()
    job_plan, shard_folder, finished_shards = check_complete(folder)
    counts = sum_counts(shard.counts for shard in finished_shards)
    if not counts.num_documents:
        raise DataError(f"no documents in any part of {folder} ({counts.num_empty} empty, {counts.num_bad} bad)")
    bad_path = _write_output(prefix, job_plan, shard_folder, finished_shards, counts)
    return Summary(
        **{name: value for name, value in counts._asdict().items() if name not in ("num_records", "max_token_id")},
        num_units=len(finished_shards),
        seconds=time.monotonic() - start_s,
        bad_path=bad_path,
    )


@contextmanager
def _explain_errors(job: Job, shard_folder: ShardFolder, job_progress: JobProgress) -> Iterator[None]:
    """Add the finished units' state to errors in the block; delete units that cannot be resumed."""
    try:
        yield
    except BaseException as error:
        state = _describe_finished_units(job, shard_folder, job_progress)
        if isinstance(error, (KeyboardInterrupt, StopRequest)):
            raise StopRequest(f"stopped; {state}") from None
        if isinstance(error, UnitError):
            raise UnitError(f"{error}; {state}") from None
        if isinstance(error, OSError) and error.errno in plan.DISK_FULL_ERRNOS:
            text = plan.disk_full_message(
                error, shard_folder.folder, job_progress.counts, job_progress.total_bytes, shard_folder.dtype.itemsize
            )
            raise DataError(f"{text}; {state}") from error
        if isinstance(error, DataError):
            raise DataError(f"{str(error).rstrip('.')}. {state[0].upper()}{state[1:]}") from error.__cause__
        raise


def _describe_finished_units(job: Job, shard_folder: ShardFolder, job_progress: JobProgress) -> str:
    """Describe the finished units for an error message; delete units that cannot be resumed."""
    num_finished = sum(shard_folder.path(unit_idx, "json").exists() for unit_idx in job_progress.units)
    if job.share:
        return (
            f"{num_finished} of its {len(job_progress.units)} units are finished and saved; the same command "
            "continues with them."
        )
    if num_finished and all(unit.path != STDIN for unit in job_progress.units.values()):
        return (
            f"{num_finished} of {len(job_progress.units)} units are finished and saved; --resume continues with them."
        )
    with suppress(OSError, DataError):
        shard_folder.remove()
    return "no units are saved."
