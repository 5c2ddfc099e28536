"""What a job is asked to do, and what it says when it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to turn into what. The tokens do not depend on ``num_workers`` nor on ``unit_bytes``.

    Args:
        inputs: files and folders in order; ``-`` for standard input.
        output_prefix: path of the output without ``.bin``.
        make_tokenizer: called once.
        format: of all inputs, one of ``FORMATS``; None for that which each file's name says.
        json_keys: where the text is; those of several keys are joined.
        max_bad_lines, max_bad_fraction: how much may be bad (``Limits``).
        max_document_chars: longer documents are bad; 0 for no limit.
        unit_bytes: size of the units of work; None for what suits the input and the workers.
        resume: go on with the finished units of a job that was cut off.
        use_gigatoken: encode with ``gigatoken`` where it gives the same ids.
    """

    inputs: Sequence[Path | str]
    output_prefix: str
    make_tokenizer: Callable[[], Tokenizer]
    format: str | None = None
    json_keys: Sequence[str] = ("text",)
    append_eod: bool = True
    num_workers: int = 1
    max_bad_lines: int | None = None
    max_bad_fraction: float | None = None
    max_document_chars: int = 0
    unit_bytes: int | None = None
    resume: bool = False
    use_gigatoken: bool = False


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What came of a job.

    Args:
        num_bytes: of text and JSON, decompressed, those of resumed units among them.
        num_resumed: units that were finished before.
        seconds: of this run.
        bad_path: where the bad records are told, None where there are none.
    """

    num_documents: int
    num_tokens: int
    num_empty: int = 0
    num_bad: int = 0
    num_bytes: int = 0
    num_units: int = 0
    num_resumed: int = 0
    seconds: float = 0.0
    bad_path: str | None = None
