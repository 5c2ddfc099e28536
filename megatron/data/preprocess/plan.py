"""What a job is: what it reads, how it encodes and into which units it is cut. Parts of one plan fit no other."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron import files
from megatron.data.preprocess.parts import PLAN
from megatron.data.preprocess.records import STDIN, Unit
from megatron.errors import DataError

FORMAT = 2
_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that the tokens depend on.

    Args:
        inputs: (absolute path, bytes, time of the last change in ns) of each file in order, as often as it is read.
        units: a digest of what each unit reads.
        options: value of each option of the tool that changes tokens or units.
        tokenizer: what is told apart of it, by name.
        committed: the output is in place, and this is what it came to; the parts only wait to be deleted.
    """

    inputs: Sequence[tuple[str, int, int]]
    units: str
    options: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    committed: Mapping[str, Any] | None = None
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Put the plan into the folder of the parts."""
        files.replace_bytes(folder / PLAN, json.dumps(dataclasses.asdict(self), indent=1).encode())

    def differences(self, earlier: Plan) -> list[str]:
        """Return what is not as it was in ``earlier``, each in words."""
        if self.format != earlier.format:
            return ["the parts are those of another version of this tool"]
        found = _changed("", earlier.options, self.options)
        found += _changed("the tokenizer's ", earlier.tokenizer, self.tokenizer)
        found += _changed_inputs(earlier.inputs, self.inputs)
        return found if found or self.units == earlier.units else ["the input is cut into other units"]


def inputs_of(units: Sequence[Unit]) -> list[tuple[str, int, int]]:
    """Return ``Plan.inputs`` of ``units``: a file once for all of its units, a stream not at all.

    Raises:
        DataError: a file is no longer there.
    """
    return [_file_facts(path) for unit in units if not unit.start for path in unit.paths if path != STDIN]


def digest_of(units: Sequence[Unit]) -> str:
    """Return ``Plan.units``: another text for other units, wherever the job is started."""
    digest = hashlib.sha256()
    for unit in units:
        paths = [path if path == STDIN else os.path.abspath(path) for path in unit.paths]
        digest.update(json.dumps([unit.format, unit.start, unit.stop, *paths]).encode() + b"\n")
    return digest.hexdigest()


def changes(plan: Plan, units: Sequence[Unit]) -> str:
    """Return in what the files are no longer what they were when the job began, "" where they are."""
    return _named(_changed_inputs(plan.inputs, inputs_of(units)))


def read(folder: Path) -> Plan | None:
    """Return the plan of the parts in ``folder``, None where there is none that can be read."""
    try:
        fields = json.loads((folder / PLAN).read_bytes())
        if fields["format"] != FORMAT:
            return Plan(inputs=(), units="", options={}, tokenizer={}, format=fields["format"])
        fields["inputs"] = [(str(path), int(size), int(time)) for path, size, time in fields["inputs"]]
        return Plan(**fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def check_same(plan: Plan, earlier: Plan, folder: Path) -> None:
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
    return [f"{of}{name} was {_told(earlier.get(name))}, now {_told(now.get(name))}" for name in names]


def _told(value: object) -> str:
    return shlex.join(value) if isinstance(value, list) else str(value)


def _file_facts(path: str) -> tuple[str, int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"--input {path} cannot be read any more: {error.strerror}") from error
    return os.path.abspath(path), status.st_size, status.st_mtime_ns


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
