"""Check the completeness of a folder of parts that several jobs have written (``--part 3/16``)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.data.preprocess import plan
from megatron.data.preprocess.plan import JobPlan
from megatron.data.preprocess.progress import progress
from megatron.data.preprocess.shards import PLAN, Part, ShardFolder
from megatron.errors import DataError

_WRONG = ("missing", "damaged", "of another job")
_NAMED_SHARES, _NAMED_UNITS = 10, 5
_UNIT = re.compile(r"unit-(\d{6,})\.json")


def check_complete(folder: Path) -> tuple[JobPlan, ShardFolder, list[Part]]:
    """Verify all units in ``folder`` and return the plan, the folder and the parts of the units in order.

    Raises:
        DataError: the folder was not written by jobs with ``--part``, or a unit is missing, damaged or from another
            job; the message names the parts that must be rerun.
    """
    job_plan = plan.read(folder)
    if job_plan is None:
        raise DataError(f"{folder} must contain the parts of jobs with --part; it has no readable {PLAN}.")
    if not job_plan.num_shares or not job_plan.num_units:
        raise DataError(
            f"{folder} must contain the parts of jobs with --part, got a job without --part, which --resume continues."
        )
    parts = plan.folder_for(folder, job_plan, is_shared=True)
    finished: list[Part] = []
    problems: dict[str, list[int]] = defaultdict(list)
    with progress("checking", job_plan.num_units) as show:
        for unit in range(job_plan.num_units):
            result = parts.look_at(unit)
            if isinstance(result, Part):
                finished.append(result)
            else:
                problems[result].append(unit)
            show(unit + 1, f"{unit + 1} of {job_plan.num_units} units")
    present = [int(name[1]) for path in folder.iterdir() if (name := _UNIT.fullmatch(path.name))]
    beyond = sorted(unit for unit in present if unit >= job_plan.num_units)
    if problems or beyond:
        raise DataError(_in_words(folder, job_plan, problems, beyond))
    return job_plan, parts, finished


def _in_words(folder: Path, found: JobPlan, wrong: Mapping[str, Sequence[int]], beyond: Sequence[int]) -> str:
    """Return the error message for units with a problem (problem -> units) and units that the plan does not have."""
    num_shares = found.num_shares
    texts = [f"{problem}: {_by_share(wrong[problem], num_shares)}" for problem in _WRONG if problem in wrong]
    if beyond:
        texts.append(
            f"of another job: {_few([f'unit {unit}' for unit in beyond], _NAMED_UNITS)}, which the plan does not have"
        )
    reruns = sorted({unit % num_shares + 1 for units in wrong.values() for unit in units})
    fix = f"Run again: {_few([f'--part {share}/{num_shares}' for share in reruns], _NAMED_SHARES)}." if reruns else ""
    if beyond:
        fix += f" Remove the files of other jobs from {folder}."
    return f"{folder} must contain all {found.num_units} units of {num_shares} parts; {'; '.join(texts)}. {fix.strip()}"


def _by_share(units: Sequence[int], num_shares: int) -> str:
    """List ``units``, grouped by the share that encodes them."""
    shares: dict[int, list[int]] = defaultdict(list)
    for unit in units:
        shares[unit % num_shares + 1].append(unit)
    descriptions = [
        f"part {share}/{num_shares} (units {_few([str(unit) for unit in share_units], _NAMED_UNITS)})"
        for share, share_units in sorted(shares.items())
    ]
    return _few(descriptions, _NAMED_SHARES)


def _few(texts: Sequence[str], most: int) -> str:
    """Join the first ``most`` texts for a message, and add the number of omitted texts."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
