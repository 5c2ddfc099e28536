"""Convert a corpus to token files: inputs -> units -> records -> documents, encoded in parallel and merged in order.

Names are resolved on first use, because a tool that only prints its help needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tds.lazy_imports import lazy_attribute

if TYPE_CHECKING:
    from megatron.data.preprocess.corpus import UNIT_BYTES, find_inputs, guess_format, plan_units, read_unit
    from megatron.data.preprocess.encode import parse
    from megatron.data.preprocess.job import join, run
    from megatron.data.preprocess.job_types import FORMATS, STDIN, BadRecord, Job, Record, Share, Summary, Unit
    from megatron.data.preprocess.verification import Verified, verify

_MODULES = {
    "FORMATS": "megatron.data.preprocess.job_types",
    "STDIN": "megatron.data.preprocess.job_types",
    "UNIT_BYTES": "megatron.data.preprocess.corpus",
    "BadRecord": "megatron.data.preprocess.job_types",
    "Job": "megatron.data.preprocess.job_types",
    "Record": "megatron.data.preprocess.job_types",
    "Share": "megatron.data.preprocess.job_types",
    "Summary": "megatron.data.preprocess.job_types",
    "Unit": "megatron.data.preprocess.job_types",
    "Verified": "megatron.data.preprocess.verification",
    "find_inputs": "megatron.data.preprocess.corpus",
    "guess_format": "megatron.data.preprocess.corpus",
    "join": "megatron.data.preprocess.job",
    "parse": "megatron.data.preprocess.encode",
    "plan_units": "megatron.data.preprocess.corpus",
    "read_unit": "megatron.data.preprocess.corpus",
    "run": "megatron.data.preprocess.job",
    "verify": "megatron.data.preprocess.verification",
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
    return lazy_attribute(__name__, name, _MODULES)
