"""A whole preprocessing job: a corpus in, a pair of token files out.

plan -> units encoded into parts by worker processes -> parts laid end to end -> all files in place at once.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from megatron import log
from megatron.data.preprocess import bad, plan, prepare, space
from megatron.data.preprocess.counts import Counts, total
from megatron.data.preprocess.encode import Encoder
from megatron.data.preprocess.gigatoken import with_gigatoken
from megatron.data.preprocess.inputs import find_inputs
from megatron.data.preprocess.limits import Limits, TooManyBad
from megatron.data.preprocess.lock import locked
from megatron.data.preprocess.merge import merge
from megatron.data.preprocess.parts import Parts, folder_of
from megatron.data.preprocess.plan import Plan
from megatron.data.preprocess.progress import progress
from megatron.data.preprocess.records import STDIN
from megatron.data.preprocess.settings import Job, Summary
from megatron.data.preprocess.supervise import UnitError, Workers
from megatron.data.preprocess.tally import Tally
from megatron.data.preprocess.worker import Work
from megatron.data.token_writer import TokenFileWriter, check_prefix
from megatron.errors import DataError, StopRequest
from megatron.tokenizer import Tokenizer


def run(job: Job) -> Summary:
    """Do the job; the output files appear at the end, all or none.

    Raises:
        DataError: an input cannot be used, too much of it is bad, it holds no document, there is no room, or another
            job writes the same files.
        UnitError: a worker process failed or died.
        StopRequest: stopped by Ctrl-C or by a StopRequest; finished units are kept for ``resume``.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a library do not live on in a forked process
    check_prefix(job.output_prefix)
    paths = find_inputs(job.inputs)
    prepare.check_resumable(job, paths)
    tokenizer = job.make_tokenizer()
    if job.append_eod:
        tokenizer.eod_id  # noqa: B018 - a vocabulary without one is refused before anything is done
    with ExitStack() as lock:
        try:
            lock.enter_context(locked(folder_of(job.output_prefix)))
            found, units, parts = prepare.open_parts(job, paths, tokenizer)
        except OSError as error:
            raise DataError(f"--output-prefix {job.output_prefix} cannot be written: {error}") from error
        if found.committed is None:
            tally = Tally(units)
            with _explained(parts, tally):
                _encode(job, tokenizer, parts, tally)
                found = _finish(job, tokenizer, parts, tally, found)
        else:
            log.info(f"{job.output_prefix}.bin was finished already")
        parts.remove()
        return Summary(**(found.committed or {}))


def _encode(job: Job, tokenizer: Tokenizer, parts: Parts, tally: Tally) -> None:
    """Have each unit encoded that is not finished."""
    units = tally.units
    left = [unit for unit in units if not parts.path(unit.number, "json").exists()]
    space.check_for_units(parts.folder, left, parts.dtype.itemsize)
    if job.use_gigatoken:
        tokenizer = with_gigatoken(tokenizer, units, job.json_keys)
    encoder = Encoder(tokenizer, tuple(job.json_keys), job.append_eod, job.max_document_chars)
    limits = Limits(job.max_bad_lines, job.max_bad_fraction)
    already = tally.total_bytes - sum(unit.size for unit in left)
    try:
        with (
            Workers(Work(units, encoder, parts), min(job.num_workers, len(units))) as workers,
            progress("encoding", tally.total_bytes, already) as show,
        ):

            def on_report(running: Mapping[int, Counts]) -> None:
                counts = total((tally.counts, *running.values()))
                limits.check(counts, tally.most_records(running, counts))
                show(tally.done(running), tally.in_words(counts))

            tally.begin()
            workers.encode(range(len(units)), on_report, tally.add)
        limits.check(tally.counts, tally.counts.num_records)
    except TooManyBad as error:
        shown = bad.gather(job.output_prefix, parts, units)
        raise DataError(
            f"{error}:\n" + "\n".join(f"  {text}" for text in shown) + f"\nAll of them are in "
            f"{bad.path_of(job.output_prefix)}. Correct them, or allow more: bad lines are left out."
        ) from None


def _finish(job: Job, tokenizer: Tokenizer, parts: Parts, tally: Tally, begun: Plan) -> Plan:
    """Put the output in place; return the plan with what it came to."""
    if changed := plan.changes(begun, tally.units):
        parts.remove()  # they are those of an input that is no more
        raise DataError(f"the input must stay as it is while it is read; {changed}. Run again once it does.")
    shown = bad.gather(job.output_prefix, parts, tally.units)
    if not tally.counts.num_documents:
        names = ", ".join(map(str, job.inputs))
        parts.remove()
        raise DataError(f"no documents in {names} ({tally.counts.num_empty} empty, {tally.counts.num_bad} bad)")
    space.check_for_output(parts.folder, tally.counts, parts.dtype.itemsize)
    writer = TokenFileWriter(
        job.output_prefix,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.identity,
        eod_id=tokenizer.eod_id if job.append_eod else None,
    )
    with progress("joining", tally.counts.num_tokens * parts.dtype.itemsize) as show:
        merge(writer, parts, tally.parts(), lambda done: show(done, f"{done / 1e6:.0f} MB"))
    bad_path = str(bad.path_of(job.output_prefix)) if shown else None
    ended = dataclasses.replace(begun, committed=dataclasses.asdict(tally.summary(bad_path)))
    ended.write(parts.folder)
    return ended


@contextmanager
def _explained(parts: Parts, tally: Tally) -> Iterator[None]:
    """Add to an error what is kept of the job; what nobody can go on with is removed."""
    try:
        yield
    except BaseException as error:
        kept = _kept(parts, tally)
        if isinstance(error, (KeyboardInterrupt, StopRequest)):
            raise StopRequest(f"stopped; {kept}") from None
        if isinstance(error, UnitError):
            raise UnitError(f"{error}; {kept}") from None
        if isinstance(error, OSError) and error.errno in space.FULL:
            text = space.in_words(error, parts.folder, tally.counts, tally.total_bytes, parts.dtype.itemsize)
            raise DataError(f"{text}; {kept}") from error
        if isinstance(error, DataError):
            raise DataError(f"{str(error).rstrip('.')}. {kept[0].upper()}{kept[1:]}") from error.__cause__
        raise


def _kept(parts: Parts, tally: Tally) -> str:
    num_kept = sum(parts.path(unit.number, "json").exists() for unit in tally.units)
    if num_kept and all(unit.path != STDIN for unit in tally.units):
        return f"{num_kept} of {len(tally.units)} units are finished and kept: --resume goes on with them."
    with suppress(OSError, DataError):
        parts.remove()
    return "nothing is kept."
