"""Errors that a person can act on, each with the exit code of the job that it ends.

| class | when | exit code |
|---|---|---|
| ConfigError, DataError | a value, file or flag that the user gave | 2 |
| CheckpointError | a checkpoint that is missing, damaged or of another model | 3 |
| PeerError | another rank died or did not answer in time | 4 |
| NumericsError | loss or gradient is not finite | 5 |
| StopRequest | asked to stop; everything is saved, the run can go on | 75 |
| anything else | a defect | 1 |

A message says what must hold, what was got, and what to do. Where all ranks raise the same one, rank 0 alone says it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class JobError(Exception):
    """An error of the table above but its last row.

    ``is_of_this_rank``: no other rank need know of it, so the rank that raises it must say it. The classes say what is
    usual; a single error may differ.
    """

    is_of_this_rank = True


class ConfigError(JobError, ValueError):
    """A flag, environment variable or JSON value that cannot be used."""

    is_of_this_rank = False


class DataError(JobError, ValueError):
    """A corpus, token file or tokenizer that cannot be used."""

    is_of_this_rank = False


class SampleError(DataError):
    """A sample that cannot be read, or samples that cannot be put together; the text names them and their place."""


class CheckpointError(JobError, RuntimeError):
    """A checkpoint that does not fit or does not verify."""


class PeerError(JobError, RuntimeError):
    """Another rank died or timed out."""


class NumericsError(JobError, ArithmeticError):
    """A loss or gradient that is not finite."""


class StopRequest(JobError):
    """The run was asked to stop and has saved what it needs to go on."""

    is_of_this_rank = False


@contextmanager
def marked(*, is_of_this_rank: bool) -> Iterator[None]:
    """Mark a JobError that is raised within as one of this rank, or as one that all ranks raise alike."""
    try:
        yield
    except JobError as error:
        error.is_of_this_rank = is_of_this_rank
        raise


EXIT_CODES: dict[type[BaseException], int] = {
    ConfigError: 2,
    DataError: 2,
    CheckpointError: 3,
    PeerError: 4,
    NumericsError: 5,
    StopRequest: 75,
}


def exit_code(error: BaseException) -> int:
    """Return the job's exit code for ``error``: the table at the top of this file, else 1.

    A SystemExit keeps a code of its own, but for 0: that is for a run that has reached its end.
    """
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF or 1
    for kind, code in EXIT_CODES.items():
        if isinstance(error, kind):
            return code
    return 1


def raise_all(problems: list[str]) -> None:
    """Raise one ConfigError with a numbered list, or return when the list is empty."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        raise ConfigError(unique[0])
    if unique:
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(unique, 1))
        raise ConfigError(f"{len(unique)} problems in the configuration:\n{lines}")
