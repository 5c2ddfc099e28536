"""Each kind of error ends the job with its own code."""

from __future__ import annotations

import pytest

from megatron import errors
from megatron.errors import exit_code

ERROR_TYPES = [
    (errors.ConfigError, ValueError, 2),
    (errors.DataError, ValueError, 2),
    (errors.CheckpointError, RuntimeError, 3),
    (errors.PeerError, RuntimeError, 4),
    (errors.NumericsError, ArithmeticError, 5),
    (errors.StopRequest, Exception, 75),
]


@pytest.mark.parametrize(
    ("error_type", "base", "code"), ERROR_TYPES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_exit_code_depends_on_error_type(error_type, base, code):
    assert exit_code(error_type("told")) == code
    assert issubclass(error_type, base)
    assert exit_code(type("Narrower", (error_type,), {})("told")) == code


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), ArithmeticError("x"), KeyboardInterrupt()])
def test_other_exceptions_exit_with_code_1(error):
    assert exit_code(error) == 1


def test_every_error_class_has_documented_exit_code():
    error_classes = {
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, BaseException)
    }
    without_code = {errors.JobError, errors.SampleError}  # the base of all; and a kind of DataError
    assert error_classes - without_code == set(errors.EXIT_CODES) == {error_type for error_type, _, _ in ERROR_TYPES}
    assert exit_code(errors.SampleError("sample 3 cannot be read")) == exit_code(errors.DataError("no documents"))
    for code in errors.EXIT_CODES.values():
        assert f"| {code} |" in errors.__doc__
