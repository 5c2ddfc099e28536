"""What a job is: what it reads, how it encodes and into which units it is cut. Parts of one plan fit no other."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron import files
from megatron.data.preprocess.parts import PLAN
from megatron.data.preprocess.records import STDIN, Unit
from megatron.errors import DataError

FORMAT = 1
_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that the tokens depend on.

    Args:
        inputs: absolute path of each file: (bytes, time of the last change in ns).
        options: value of each option of the tool that changes tokens or units.
        tokenizer: what is told apart of it, by name.
        committed: the output is in place, and this is what it came to; the parts only wait to be deleted.
    """

    inputs: Mapping[str, tuple[int, int]]
    options: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    committed: Mapping[str, Any] | None = None
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Put the plan into the folder of the parts."""
        files.replace_bytes(folder / PLAN, json.dumps(dataclasses.asdict(self), indent=1).encode())

    def differences(self, earlier: Plan) -> list[str]:
        """Return what is not as it was in ``earlier``, each in words."""
        found = [] if self.format == earlier.format else ["the parts are those of another version of this tool"]
        found += _changed("", earlier.options, self.options)
        found += _changed("the tokenizer's ", earlier.tokenizer, self.tokenizer)
        if list(earlier.inputs) != list(self.inputs) and set(earlier.inputs) == set(self.inputs):
            found.append("the order of --input has changed")
        found += [f"{path} is no longer read" for path in earlier.inputs if path not in self.inputs]
        found += [f"{path} is new" for path in self.inputs if path not in earlier.inputs]
        common = [path for path in self.inputs if path in earlier.inputs]
        return found + [
            _difference(path, *earlier.inputs[path], *self.inputs[path])
            for path in common
            if earlier.inputs[path] != self.inputs[path]
        ]


def facts_of(units: Sequence[Unit]) -> dict[str, tuple[int, int]]:
    """Return (bytes, time of the last change in ns) of all files of ``units``, in their order; none for a stream."""
    paths = dict.fromkeys(path for unit in units for path in unit.paths if path != STDIN)
    found = {}
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"--input {path} cannot be read any more: {error.strerror}") from error
        found[os.path.abspath(path)] = (status.st_size, status.st_mtime_ns)
    return found


def check_unchanged(plan: Plan, units: Sequence[Unit]) -> None:
    """Check that the files are still what they were when the job began.

    Raises:
        DataError: names what changed.
    """
    changed = dataclasses.replace(plan, inputs=facts_of(units)).differences(plan)
    if changed:
        raise DataError(
            f"the input must stay as it is while it is read; {_named(changed)}. Run again without --resume."
        )


def read(folder: Path) -> Plan | None:
    """Return the plan of the parts in ``folder``, None where there is none that can be read."""
    try:
        fields = json.loads((folder / PLAN).read_bytes())
        fields["inputs"] = {path: (int(size), int(time)) for path, (size, time) in fields["inputs"].items()}
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
    return [f"{of}{name} was {earlier.get(name)}, now {now.get(name)}" for name in names]


def _difference(path: str, size: int, time: int, new_size: int, new_time: int) -> str:
    if size != new_size:
        return f"{path} had {size} bytes, now {new_size}"
    return (
        f"{path} was written again {abs(new_time - time) / 1e9:.1f} s {'after' if new_time > time else 'before'} that"
    )
