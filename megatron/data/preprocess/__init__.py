"""From a corpus to token files: inputs -> units -> records -> documents, encoded in processes, merged in order.

Names are resolved on first use: a tool that prints its help needs few of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.data.preprocess.corpus import UNIT_BYTES, find_inputs, guess_format, plan_units, read_unit
    from megatron.data.preprocess.encode import parse
    from megatron.data.preprocess.job import join, run
    from megatron.data.preprocess.job_types import FORMATS, STDIN, BadRecord, Job, Record, Share, Summary, Unit
    from megatron.data.preprocess.verification import Verified, verify

_MODULES = {
    "FORMATS": "job_types",
    "STDIN": "job_types",
    "UNIT_BYTES": "corpus",
    "BadRecord": "job_types",
    "Job": "job_types",
    "Record": "job_types",
    "Share": "job_types",
    "Summary": "job_types",
    "Unit": "job_types",
    "Verified": "verification",
    "find_inputs": "corpus",
    "guess_format": "corpus",
    "join": "job",
    "parse": "encode",
    "plan_units": "corpus",
    "read_unit": "corpus",
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
    "Share",
    "Summary",
    "Unit",
    "Verified",
    "find_inputs",
    "guess_format",
    "join",
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
