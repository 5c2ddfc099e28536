"""Errors that a person can act on, each with the exit code of the job that it ends.

| class | when | exit code |
|---|---|---|
| ConfigError, DataError | a value, file or flag that the user gave | 2 |
| CheckpointError | a checkpoint that is missing, damaged or of another model | 3 |
| PeerError | another rank died or did not answer in time | 4 |
| NumericsError | loss or gradient is not finite | 5 |
| StopRequest | asked to stop; everything is saved, the run can go on | 75 |
| anything else | a defect | 1 |

A message says what must hold, what was got, and what to do.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A flag, environment variable or JSON value that cannot be used."""


class DataError(ValueError):
    """A corpus, token file or tokenizer that cannot be used."""


class CheckpointError(RuntimeError):
    """A checkpoint that does not fit or does not verify."""


class PeerError(RuntimeError):
    """Another rank died or timed out."""


class NumericsError(ArithmeticError):
    """A loss or gradient that is not finite."""


class StopRequest(Exception):
    """The run was asked to stop and has saved what it needs to go on."""


EXIT_CODES: dict[type[BaseException], int] = {
    ConfigError: 2,
    DataError: 2,
    CheckpointError: 3,
    PeerError: 4,
    NumericsError: 5,
    StopRequest: 75,
}


def exit_code(error: BaseException) -> int:
    """Return the job's exit code for ``error``: the table at the top of this file, else 1."""
    for kind, code in EXIT_CODES.items():
        if isinstance(error, kind):
            return code
    return 1
