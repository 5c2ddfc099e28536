"""A folder of parts that several jobs have filled (``--part 3/16``): what is there, and what is not."""

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
    """Return the plan of the parts in ``folder``, and all of its units in order, each read through.

    Raises:
        DataError: it is no folder of ``--part``, or a unit is missing, damaged or of another job; names the parts that
            have to run again.
    """
    found = plan.read(folder)
    if found is None:
        raise DataError(f"{folder} must hold what jobs with --part have made; it has no {PLAN} that can be read.")
    if not found.num_shares or not found.num_units:
        raise DataError(
            f"{folder} must hold what jobs with --part have made; it is of a job without, which --resume goes on with."
        )
    parts = plan.folder_for(folder, found, is_shared=True)
    finished: list[Part] = []
    wrong: dict[str, list[int]] = defaultdict(list)
    with progress("checking", found.num_units) as show:
        for unit in range(found.num_units):
            looked_at = parts.look_at(unit)
            if isinstance(looked_at, Part):
                finished.append(looked_at)
            else:
                wrong[looked_at].append(unit)
            show(unit + 1, f"{unit + 1} of {found.num_units} units")
    foreign = [int(name[1]) for path in folder.iterdir() if (name := _UNIT.fullmatch(path.name))]
    beyond = sorted(unit for unit in foreign if unit >= found.num_units)
    if wrong or beyond:
        raise DataError(_in_words(folder, found, wrong, beyond))
    return found, parts, finished


def _in_words(folder: Path, found: JobPlan, wrong: Mapping[str, Sequence[int]], beyond: Sequence[int]) -> str:
    num_shares = found.num_shares
    texts = [f"{what}: {_by_share(wrong[what], num_shares)}" for what in _WRONG if what in wrong]
    if beyond:
        texts.append(
            f"of another job: {_few([f'unit {unit}' for unit in beyond], _NAMED_UNITS)}, of which there is none"
        )
    again = sorted({unit % num_shares + 1 for units in wrong.values() for unit in units})
    cure = f"Run again: {_few([f'--part {number}/{num_shares}' for number in again], _NAMED_SHARES)}." if again else ""
    if beyond:
        cure += f" Take out of {folder} what is not of it."
    return f"{folder} must hold all {found.num_units} units of {num_shares} parts; {'; '.join(texts)}. {cure.strip()}"


def _by_share(units: Sequence[int], num_shares: int) -> str:
    shares: dict[int, list[int]] = defaultdict(list)
    for unit in units:
        shares[unit % num_shares + 1].append(unit)
    named = [
        f"part {number}/{num_shares} (units {_few([str(unit) for unit in own], _NAMED_UNITS)})"
        for number, own in sorted(shares.items())
    ]
    return _few(named, _NAMED_SHARES)


def _few(texts: Sequence[str], most: int) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
