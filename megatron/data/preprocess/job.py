"""A job: units encoded by workers, parts merged, files in place at once."""

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
from megatron.data.file_io import read_sizes
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
    total,
)
from megatron.data.preprocess.plan import JobPlan
from megatron.data.preprocess.progress import ErrorLimits, JobProgress, TooManyBad, progress
from megatron.data.preprocess.shards import LOCK, Part, ShardFolder, folder_of
from megatron.data.preprocess.share import check_complete
from megatron.data.preprocess.workers import UnitError, Work, Workers
from megatron.errors import DataError, StopRequest
from megatron.file_lock import FileLock
from megatron.tokenizer import Tokenizer, with_gigatoken

# BPE by ``gigatoken``, once it has shown on texts of the corpus that its ids are the same.

_PLACES = 16
_SHARE = 128
_LEAST_CHARS, _MOST_CHARS = 1 << 12, 1 << 15  # at each place


def fast_tokenizer(tokenizer: Tokenizer, units: Sequence[Unit], keys: Sequence[str]) -> Tokenizer:
    """Return ``tokenizer`` made faster, or as it is with a warning where an id differs.

    Raises:
        DataError: gigatoken is not installed, the tokenizer is no BPE, or the corpus comes from standard input, of
            which no sample can be taken.
    """
    if any(unit.path == STDIN for unit in units):
        raise DataError("--gigatoken looks at a sample of the corpus first, which - (standard input) cannot give")
    return with_gigatoken(tokenizer, sample(units, keys), is_required=True)


def sample(units: Sequence[Unit], keys: Sequence[str]) -> list[str]:
    """Return texts from the beginnings of up to 16 units, spread evenly: a 128th of the corpus, 512 kB at most."""
    num_places = min(_PLACES, len(units))
    share = sum(unit.size for unit in units) // (_SHARE * max(num_places, 1))
    at_each = min(max(share, _LEAST_CHARS), _MOST_CHARS)
    return [
        text for place in range(num_places) for text in _first(units[place * len(units) // num_places], keys, at_each)
    ]


def _first(unit: Unit, keys: Sequence[str], num_chars: int) -> Iterator[str]:
    left = num_chars
    for text in _texts(unit, keys):
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _texts(unit: Unit, keys: Sequence[str]) -> Iterator[str]:
    for record in read_unit(unit, keys):
        found = parse(record, keys if unit.format in ("jsonl", *TABLES) else None)
        yield from () if isinstance(found, BadRecord) else found


# One job at a time for one prefix.

PATIENCE_S = 2.0
"""The workers of a job that was killed end with it, but not at the same moment."""


@contextmanager
def locked(folder: Path, share: Share | None = None) -> Iterator[None]:
    """Hold ``folder``, made if it is not there, for this process and those it forks; an empty one is removed again.

    The lock ends with the last of these processes, however they end. With ``share`` that share of it alone is held.

    Raises:
        DataError: another process holds it.
    """
    what = f"part {share} of {folder.with_suffix('')}" if share else folder.with_suffix("")

    def refusal(holder: bytes) -> str:
        return (
            f"one job at a time may write {what}; process {holder.decode('ascii', 'replace').strip() or 'unknown'} "
            f"does. Wait for it, end it, or give another {'--part' if share else '--output-prefix'}."
        )

    def warn(error: OSError, _: bytes) -> bool:
        log.warning(f"{folder} cannot be locked ({error}): let no other job write the same --output-prefix")
        return True

    lock = FileLock(
        folder / (f"{share.suffix}.lock" if share else LOCK),
        "flock",
        wait_s=lambda _: PATIENCE_S,
        describe=refusal,
        error=DataError,
        without_lock=warn,
    )
    with suppress(OSError):  # the number is for the message of another job only: a full disk may refuse it
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


# The parts laid end to end, in the order of their units: the same bytes whoever made them.


def merge(
    writer: IndexedDatasetBuilder, parts: ShardFolder, finished: Sequence[Part], on_bytes: Callable[[int], None]
) -> None:
    """Write all of ``finished`` to ``writer``; ``on_bytes`` is told the bytes of tokens written so far."""
    done = 0
    with writer:
        for part in finished:
            size, crc32 = part.facts["bin"]
            writer.append(
                parts.path(part.unit, "bin"),
                read_sizes(parts.path(part.unit, "len")),
                num_tokens=part.counts.num_tokens,
                max_token_id=part.counts.max_token_id,
                crc32=crc32,
            )
            done += size
            on_bytes(done)


# A whole preprocessing job: a corpus in, a pair of token files out.
#
# plan -> units encoded into parts by worker processes -> parts laid end to end -> all files in place at once.
# With a share it ends behind the second arrow, and ``join`` does the rest once all shares are there.


def run(job: Job) -> Summary:
    """Do the job; the output files appear at the end, all or none. With ``job.share`` its parts alone.

    Raises:
        DataError: an input cannot be used, too much of it is bad, it holds no document, there is no room, or another
            job writes the same files.
        UnitError: a worker process failed or died.
        StopRequest: stopped by Ctrl-C or by a StopRequest; finished units are kept for ``resume``.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a library do not live on in a forked process
    check_prefix(job.output_prefix)
    if job.upload_to and not job.share:
        token_upload.check_target(job.upload_to)
    paths = find_inputs(job.inputs)
    plan.check_resumable(job, paths)
    tokenizer = job.make_tokenizer()
    if job.append_eod:
        tokenizer.eod_id  # noqa: B018 - a vocabulary without one is refused before anything is done
    with ExitStack() as lock:
        try:
            lock.enter_context(locked(folder_of(job.output_prefix), job.share))
            found, units, parts = plan.open_parts(job, paths, tokenizer)
        except OSError as error:
            raise DataError(f"--output-prefix {job.output_prefix} cannot be written: {error}") from error
        if job.share:
            return _run_share(job, job.share, tokenizer, parts, units, found)
        if found.committed is None:
            tally = JobProgress(units)
            with _explained(job, parts, tally):
                _encode(job, tokenizer, parts, tally)
                found = _finish(job, parts, tally, found)
        else:
            log.info(f"{job.output_prefix}.bin was finished already")
        if job.upload_to:
            _upload(job.output_prefix, job.upload_to)
        parts.remove()
        return Summary(**(found.committed or {}))


def _run_share(
    job: Job, share: Share, tokenizer: Tokenizer, parts: ShardFolder, units: Sequence[Unit], begun: JobPlan
) -> Summary:
    """Encode the units of ``share`` that are not finished; others may be at theirs in the same folder."""
    tally = JobProgress([unit for unit in units if share.owns(unit.number)])
    with _explained(job, parts, tally):
        _encode(job, tokenizer, parts, tally, corpus=units)
        if changed := plan.changes(begun, units):
            for number in tally.units:
                parts.path(number, "json").unlink(missing_ok=True)
            raise DataError(f"the input must stay as it is until all parts are made; {changed}. Run all parts again.")
    with suppress(FileNotFoundError):  # of an earlier run that was refused; what was allowed is told by ``join``
        files.remove_file(shards.path_of(_bad_prefix(job)))
    return tally.summary(None)


def _upload(prefix: str, target: str) -> None:
    """Upload the finished output; the parts stay until it is there, so that ``resume`` need not make it again."""
    try:
        token_upload.upload(prefix, target)
    except DataError as error:
        raise DataError(f"{error} --resume uploads them again.") from error


def _bad_prefix(job: Job) -> str:
    return f"{job.output_prefix}.{job.share.suffix}" if job.share else job.output_prefix


def _encode(
    job: Job, tokenizer: Tokenizer, parts: ShardFolder, tally: JobProgress, corpus: Sequence[Unit] | None = None
) -> None:
    """Have each unit of ``tally`` encoded that is not finished; ``corpus``: all units, if there are more."""
    units = list(tally.units.values())
    left = [unit for unit in units if not parts.path(unit.number, "json").exists()]
    for number, paths in parts.unfinished().items():
        if number in tally.units:
            for path in paths:
                path.unlink(missing_ok=True)
    plan.check_for_units(parts.folder, left, parts.dtype.itemsize)
    if job.use_gigatoken:
        tokenizer = fast_tokenizer(tokenizer, units if corpus is None else corpus, job.json_keys)
    encoder = Encoder(tokenizer, tuple(job.json_keys), job.append_eod, job.max_document_chars)
    limits = ErrorLimits(job.max_bad_lines, job.max_bad_fraction)
    already = tally.total_bytes - sum(unit.size for unit in left)
    try:
        with (
            _workers(job, Work(tally.units, encoder, parts)) as workers,
            progress("encoding", tally.total_bytes, already) as show,
        ):

            def on_report(running: Mapping[int, Counts]) -> None:
                counts = total((tally.counts, *running.values()))
                limits.check(counts, tally.most_records(running, counts))
                show(tally.done(running), tally.in_words(counts))

            tally.begin()
            workers.encode(list(tally.units), on_report, tally.add)
        limits.check(tally.counts, tally.counts.num_records)
    except TooManyBad as error:
        shown = shards.gather(_bad_prefix(job), parts, tally.units)
        listed = _with_bad_lines(str(error), shown, _bad_prefix(job))
        raise DataError(f"{listed}. Correct them, or allow more: bad lines are left out.") from None


def _with_bad_lines(problem: str, shown: Sequence[str], prefix: str) -> str:
    """Return ``problem`` with the first bad lines and the path of the file that lists them all."""
    lines = "\n".join(f"  {text}" for text in shown)
    return f"{problem}:\n{lines}\nAll of them are in {shards.path_of(prefix)}"


def _workers(job: Job, work: Work) -> Workers | ClusterWorkers:
    if job.cluster:
        return ClusterWorkers(work, job.cluster, job.num_workers)
    return Workers(work, min(job.num_workers, len(work.units)))


def _finish(job: Job, parts: ShardFolder, tally: JobProgress, begun: JobPlan) -> JobPlan:
    """Put the output in place; return the plan with what it came to."""
    if changed := plan.changes(begun, list(tally.units.values())):
        parts.remove()  # they are those of an input that is no more
        raise DataError(f"the input must stay as it is while it is read; {changed}. Run again once it does.")
    if not tally.counts.num_documents:
        shown = shards.gather(job.output_prefix, parts, tally.units)
        names = ", ".join(map(str, job.inputs))
        parts.remove()
        problem = f"no documents in {names} ({tally.counts.num_empty} empty, {tally.counts.num_bad} bad)"
        raise DataError(f"{_with_bad_lines(problem, shown, job.output_prefix)}. Correct them." if shown else problem)
    bad_path = _write_output(job.output_prefix, begun, parts, tally.parts(), tally.counts)
    ended = dataclasses.replace(begun, committed=dataclasses.asdict(tally.summary(bad_path)))
    ended.write(parts.folder)
    return ended


def _write_output(prefix: str, of: JobPlan, parts: ShardFolder, finished: Sequence[Part], counts: Counts) -> str | None:
    """Put the output made of all ``finished`` in place; return where the bad records are told, if there are any."""
    shown = shards.gather(prefix, parts, [part.unit for part in finished])
    plan.check_for_output(Path(prefix).absolute().parent, counts, parts.dtype.itemsize)
    writer = IndexedDatasetBuilder(
        prefix, vocab_size=of.tokenizer["size"], tokenizer=of.tokenizer["identity"], eod_id=of.eod_id
    )
    with progress("joining", counts.num_tokens * parts.dtype.itemsize) as show:
        merge(writer, parts, finished, lambda done: show(done, f"{done / 1e6:.0f} MB"))
    return str(shards.path_of(prefix)) if shown else None


def join(folder: Path, prefix: str) -> Summary:
    """Make the output of the parts in ``folder``, which jobs with ``--part`` have made: the bytes of a single job.

    The parts stay. Each is read through before it is used.

    Raises:
        DataError: a part is missing, damaged or of another job (all are named), or there is no document.
    """
    check_prefix(prefix)
    began = time.monotonic()
    of, parts, finished = check_complete(folder)
    counts = total(part.counts for part in finished)
    if not counts.num_documents:
        raise DataError(f"no documents in any part of {folder} ({counts.num_empty} empty, {counts.num_bad} bad)")
    bad_path = _write_output(prefix, of, parts, finished, counts)
    return Summary(
        **{name: value for name, value in counts._asdict().items() if name not in ("num_records", "max_token_id")},
        num_units=len(finished),
        seconds=time.monotonic() - began,
        bad_path=bad_path,
    )


@contextmanager
def _explained(job: Job, parts: ShardFolder, tally: JobProgress) -> Iterator[None]:
    """Add to an error what is kept of the job; what nobody can go on with is removed."""
    try:
        yield
    except BaseException as error:
        kept = _kept(job, parts, tally)
        if isinstance(error, (KeyboardInterrupt, StopRequest)):
            raise StopRequest(f"stopped; {kept}") from None
        if isinstance(error, UnitError):
            raise UnitError(f"{error}; {kept}") from None
        if isinstance(error, OSError) and error.errno in plan.FULL:
            text = plan.in_words(error, parts.folder, tally.counts, tally.total_bytes, parts.dtype.itemsize)
            raise DataError(f"{text}; {kept}") from error
        if isinstance(error, DataError):
            raise DataError(f"{str(error).rstrip('.')}. {kept[0].upper()}{kept[1:]}") from error.__cause__
        raise


def _kept(job: Job, parts: ShardFolder, tally: JobProgress) -> str:
    num_kept = sum(parts.path(number, "json").exists() for number in tally.units)
    if job.share:
        return f"{num_kept} of its {len(tally.units)} units are finished and kept: the same command goes on with them."
    if num_kept and all(unit.path != STDIN for unit in tally.units.values()):
        return f"{num_kept} of {len(tally.units)} units are finished and kept: --resume goes on with them."
    with suppress(OSError, DataError):
        parts.remove()
    return "nothing is kept."
