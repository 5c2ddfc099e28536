"""Errors that a user can fix, and the exit codes of jobs that end with them.

| class | cause | exit code |
|---|---|---|
| ConfigError, DataError | a value, file or flag given by the user | 2 |
| CheckpointError | a checkpoint that is missing, damaged or of another model | 3 |
| PeerError | another rank died or did not answer in time | 4 |
| NumericsError | loss or gradient is not finite | 5 |
| StopRequest | the run was asked to stop; everything is saved and it can be resumed | 75 |
| any other exception | a defect | 1 |

A message states the requirement, the actual value, and the fix. If all ranks raise the same error, only rank 0 prints
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class JobError(Exception):
    """Base class for the errors in the table above, except the last row.

    ``is_of_this_rank``: True if other ranks do not raise the same error, so the rank that raises it must print it. Each
    class sets a default, which an instance may override.
    """

    is_of_this_rank = True


class ConfigError(JobError, ValueError):
    """A flag, environment variable or JSON value that cannot be used."""

    is_of_this_rank = False


class DataError(JobError, ValueError):
    """A corpus, token file or tokenizer that cannot be used."""

    is_of_this_rank = False


class SampleError(DataError):
    """A sample that cannot be read, or samples that cannot be batched; the message names their location."""


class CheckpointError(JobError, RuntimeError):
    """A checkpoint that does not match or does not verify."""


class PeerError(JobError, RuntimeError):
    """Another rank died or timed out."""


class NumericsError(JobError, ArithmeticError):
    """A loss or gradient that is not finite."""


class StopRequest(JobError):
    """The run was asked to stop and has saved its state for resuming."""

    is_of_this_rank = False


@contextmanager
def marked(*, is_of_this_rank: bool) -> Iterator[None]:
    """Set ``is_of_this_rank`` of a JobError raised in the block: False if all ranks raise the same error."""
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
    """Return the job's exit code for ``error``: the code in the table at the top of this file, otherwise 1.

    A SystemExit keeps its own code, but code 0 becomes 1, because 0 is reserved for a run that has finished.
    """
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF or 1
    for error_type, code in EXIT_CODES.items():
        if isinstance(error, error_type):
            return code
    return 1


def raise_all(problems: list[str]) -> None:
    """Raise one ConfigError with a numbered list of ``problems``; return if there are none."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        raise ConfigError(unique[0])
    if unique:
        lines = "\n".join(f"  {idx}. {problem}" for idx, problem in enumerate(unique, 1))
        raise ConfigError(f"{len(unique)} problems in the configuration:\n{lines}")
