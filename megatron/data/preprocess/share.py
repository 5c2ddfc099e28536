"""Check if a shard folder that several jobs have written (``--part 3/16``) is complete."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.data.preprocess import plan
from megatron.data.preprocess.plan import JobPlan
from megatron.data.preprocess.progress import progress
from megatron.data.preprocess.shards import PLAN, Shard, ShardFolder
from megatron.errors import DataError

_PROBLEMS = ("missing", "damaged", "of another job")
_MAX_LISTED_SHARES, _MAX_LISTED_UNITS = 10, 5
_UNIT = re.compile(r"unit-(\d{6,})\.json")


def check_complete(folder: Path) -> tuple[JobPlan, ShardFolder, list[Shard]]:
    """Verify all units in ``folder``; the result is the plan, the folder and the units' shards in order.

    Raises:
        DataError: the folder was not written by jobs with ``--part``, or a unit is missing, damaged or from another
            job; the message names the ``--part`` values that must be rerun.
    """
    job_plan = plan.read_plan(folder)
    if job_plan is None:
        raise DataError(f"{folder} must contain the parts of jobs with --part; it has no readable {PLAN}.")
    if not job_plan.num_shares or not job_plan.num_units:
        raise DataError(
            f"{folder} must contain the parts of jobs with --part, got a job without --part, which --resume continues."
        )
    shard_folder = plan.make_shard_folder(folder, job_plan, is_shared=True)
    finished: list[Shard] = []
    problems: dict[str, list[int]] = defaultdict(list)
    with progress("checking", job_plan.num_units) as update:
        for unit_idx in range(job_plan.num_units):
            result = shard_folder.verify_unit(unit_idx)
            if isinstance(result, Shard):
                finished.append(result)
            else:
                problems[result].append(unit_idx)
            update(unit_idx + 1, f"{unit_idx + 1} of {job_plan.num_units} units")
    present_units = [int(match[1]) for path in folder.iterdir() if (match := _UNIT.fullmatch(path.name))]
    extra_units = sorted(unit_idx for unit_idx in present_units if unit_idx >= job_plan.num_units)
    if problems or extra_units:
        raise DataError(_incomplete_message(folder, job_plan, problems, extra_units))
    return job_plan, shard_folder, finished


def _incomplete_message(
    folder: Path, job_plan: JobPlan, problems: Mapping[str, Sequence[int]], extra_units: Sequence[int]
) -> str:
    """Describe units with a problem (problem -> units) and units that the plan does not have."""
    num_shares = job_plan.num_shares
    texts = [
        f"{problem}: {_list_by_share(problems[problem], num_shares)}" for problem in _PROBLEMS if problem in problems
    ]
    if extra_units:
        texts.append(
            f"of another job: {_join_first([f'unit {unit}' for unit in extra_units], _MAX_LISTED_UNITS)}, which the "
            "plan does not have"
        )
    reruns = sorted({unit % num_shares + 1 for units in problems.values() for unit in units})
    fix = (
        f"Run again: {_join_first([f'--part {share}/{num_shares}' for share in reruns], _MAX_LISTED_SHARES)}."
        if reruns
        else ""
    )
    if extra_units:
        fix += f" Remove the files of other jobs from {folder}."
    return (
        f"{folder} must contain all {job_plan.num_units} units of {num_shares} parts; {'; '.join(texts)}. {fix.strip()}"
    )


def _list_by_share(units: Sequence[int], num_shares: int) -> str:
    """List ``units``, grouped by the share that encodes them."""
    shares: dict[int, list[int]] = defaultdict(list)
    for unit in units:
        shares[unit % num_shares + 1].append(unit)
    descriptions = [
        f"part {share}/{num_shares} (units {_join_first([str(unit) for unit in share_units], _MAX_LISTED_UNITS)})"
        for share, share_units in sorted(shares.items())
    ]
    return _join_first(descriptions, _MAX_LISTED_SHARES)


def _join_first(texts: Sequence[str], max_listed: int) -> str:
    """Join the first ``max_listed`` texts for a message, and count the omitted texts."""
    return ", ".join(texts[:max_listed]) + (f" and {len(texts) - max_listed} more" if len(texts) > max_listed else "")
