"""From a corpus to token files: inputs -> units -> records -> documents, encoded in processes, merged in order.

Names are resolved on first use: a tool that prints its help needs few of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.data.preprocess.documents import parse
    from megatron.data.preprocess.inputs import find_inputs, guess_format
    from megatron.data.preprocess.job import run
    from megatron.data.preprocess.records import FORMATS, STDIN, BadRecord, Record, Unit
    from megatron.data.preprocess.settings import Job, Summary
    from megatron.data.preprocess.units import UNIT_BYTES, plan_units, read_unit
    from megatron.data.preprocess.verification import Verified, verify

_MODULES = {
    "FORMATS": "records",
    "STDIN": "records",
    "UNIT_BYTES": "units",
    "BadRecord": "records",
    "Job": "settings",
    "Record": "records",
    "Summary": "settings",
    "Unit": "records",
    "Verified": "verification",
    "find_inputs": "inputs",
    "guess_format": "inputs",
    "parse": "documents",
    "plan_units": "units",
    "read_unit": "units",
    "run": "job",
    "verify": "verification",
}

__all__ = [
    "FORMATS",
    "STDIN",
    "UNIT_BYTES",
    "BadRecord",
    "Job",
    "Record",
    "Summary",
    "Unit",
    "Verified",
    "find_inputs",
    "guess_format",
    "parse",
    "plan_units",
    "read_unit",
    "run",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
