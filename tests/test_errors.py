"""Each kind of error ends the job with its own code."""

from __future__ import annotations

import pytest

from megatron import errors
from megatron.errors import exit_code

CODES = [
    (errors.ConfigError, ValueError, 2),
    (errors.DataError, ValueError, 2),
    (errors.CheckpointError, RuntimeError, 3),
    (errors.PeerError, RuntimeError, 4),
    (errors.NumericsError, ArithmeticError, 5),
    (errors.StopRequest, Exception, 75),
]


@pytest.mark.parametrize(("kind", "base", "code"), CODES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_an_error_ends_the_job_with_its_code(kind, base, code):
    assert exit_code(kind("told")) == code
    assert issubclass(kind, base)
    assert exit_code(type("Narrower", (kind,), {})("told")) == code


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), ArithmeticError("x"), KeyboardInterrupt()])
def test_anything_else_is_a_defect(error):
    assert exit_code(error) == 1


def test_every_class_of_the_module_has_a_code_of_its_own_in_the_table():
    own = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, BaseException)}
    without = {errors.JobError, errors.SampleError}  # the base of all; and a kind of DataError
    assert own - without == set(errors.EXIT_CODES) == {kind for kind, _, _ in CODES}
    assert exit_code(errors.SampleError("sample 3 cannot be read")) == exit_code(errors.DataError("no documents"))
    for code in errors.EXIT_CODES.values():
        assert f"| {code} |" in errors.__doc__
