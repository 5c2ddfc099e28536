"""From text files to token files: inputs -> units -> records -> documents, encoding in processes, token writer."""

from megatron.data.preprocess.documents import parse as _parse
from megatron.data.preprocess.inputs import find_inputs, guess_format
from megatron.data.preprocess.job import Job, Summary, run
from megatron.data.preprocess.line_numbers import with_line_numbers
from megatron.data.preprocess.records import FORMATS, STDIN, BadRecord, Record, Unit
from megatron.data.preprocess.units import UNIT_BYTES, plan_units, read_unit, texts

parse = _parse  # not the module of that name, which goes when nothing imports it

__all__ = [
    "FORMATS",
    "STDIN",
    "UNIT_BYTES",
    "BadRecord",
    "Job",
    "Record",
    "Summary",
    "Unit",
    "find_inputs",
    "guess_format",
    "parse",
    "plan_units",
    "read_unit",
    "run",
    "texts",
    "with_line_numbers",
]
