"""From what is asked for to units and a folder of parts: a fresh one, or that of the job that was cut off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron import log
from megatron.data import index_format
from megatron.data.preprocess import plan
from megatron.data.preprocess.parts import Parts
from megatron.data.preprocess.plan import Plan
from megatron.data.preprocess.records import STDIN, Unit
from megatron.data.preprocess.settings import Job
from megatron.data.preprocess.units import UNIT_BYTES, plan_units
from megatron.data.token_file import TokenFile
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer

_SMALLEST_UNIT = 4 << 20
_UNITS_PER_WORKER = 8
"""So many at least, if they are not too small: the last ones then end at about the same time."""


def check_resumable(job: Job, paths: Sequence[Path]) -> None:
    """Check that a job over ``paths`` can go on with what is finished, if that is asked for.

    Raises:
        DataError: it reads standard input, which cannot be read again.
    """
    if job.resume and STDIN in map(str, paths):
        raise DataError("--resume needs input that can be read again, got - (standard input); write it to a file first")


def open_parts(job: Job, paths: Sequence[Path], tokenizer: Tokenizer) -> tuple[Plan, list[Unit], Parts]:
    """Return the plan of ``job``, or that found if it goes on, its units and its parts. The caller locks them.

    Raises:
        DataError: the parts to go on with belong to another job, or an input cannot be used.
    """
    parts = Parts(job.output_prefix, index_format.token_type(tokenizer.vocab_size))
    earlier = plan.read(parts.folder)
    goes_on = job.resume and earlier is not None
    unit_bytes = job.unit_bytes or _unit_bytes(job, paths, earlier if goes_on else None)
    units = plan_units(paths, job.format, unit_bytes)
    asked = Plan(
        inputs=plan.inputs_of(units),
        units=plan.digest_of(units),
        options=_options(job, unit_bytes),
        tokenizer=_tokenizer_facts(tokenizer),
    )
    if goes_on and earlier is not None:
        plan.check_same(asked, earlier, parts.folder)
        if earlier.committed is None or _is_in_place(job.output_prefix, earlier.committed):
            return earlier, units, parts
        asked.write(parts.folder)
        return asked, units, parts
    _remove_earlier(job, parts, earlier)
    asked.write(parts.folder)
    return asked, units, parts


def _unit_bytes(job: Job, paths: Sequence[Path], earlier: Plan | None) -> int:
    if earlier is not None and isinstance(found := earlier.options.get("--unit-bytes"), int):
        return found
    total = sum(path.stat().st_size for path in paths if str(path) != STDIN)
    return min(max(total // (job.num_workers * _UNITS_PER_WORKER), _SMALLEST_UNIT), UNIT_BYTES)


def _options(job: Job, unit_bytes: int) -> dict[str, object]:
    return {
        "--format": job.format,
        "--json-key": list(job.json_keys),
        "--no-append-eod": not job.append_eod,
        "--max-document-chars": job.max_document_chars,
        "--gigatoken": job.use_gigatoken,
        "--unit-bytes": unit_bytes,
    }


def _is_in_place(prefix: str, committed: Mapping[str, Any]) -> bool:
    """Return whether the files of a finished job are still there, and say where they are not."""
    try:
        file = TokenFile(prefix)
        told = file.sidecar is not None and file.num_tokens == committed["num_tokens"]
        reason = "" if told else "they are those of another job, or without .meta.json"
    except (DataError, KeyError) as error:
        reason = str(error)
    if reason:
        log.info(f"the files of {prefix} were finished, but are no longer in place ({reason}): they are made again")
    return not reason


def _tokenizer_facts(tokenizer: Tokenizer) -> dict[str, object]:
    return {"kind": type(tokenizer).__name__, "identity": tokenizer.identity, "size": tokenizer.vocab_size}


def _remove_earlier(job: Job, parts: Parts, earlier: Plan | None) -> None:
    if job.resume:
        log.info(f"{parts.folder} holds no finished units: --resume starts from the beginning")
    elif parts.has_any() and not (earlier and earlier.committed):
        log.info(f"removing the finished units of an earlier job, {parts.folder}; --resume would go on with them")
    parts.remove()
