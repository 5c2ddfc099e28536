"""A run folder's proof.json: facts about the run that ``tools/verify.py`` can repeat.

| key | content |
|---|---|
| ``layout_check`` | the result of the layout check (``CheckResult``) |
| ``data`` | hashes of the order of the training samples, and of the tokens of some of the samples that were consumed |
| ``tokenizer`` | its identity, and a hash of the ids of ``PROBE_TEXT`` |
| ``versions`` | versions of Python and of the packages that affect results |
| ``code`` | the git commit, and checksums of all code files and of the script |
| ``run`` | family, script, number of ranks, steps and samples |
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.training import rank_consistency
from megatron.training.data_agreement import identity_text
from megatron.training.proof.check_result import CheckResult

FILE_NAME = "proof.json"
FORMAT = 1
NUM_SAMPLES = 16
"""Number of samples whose tokens are hashed: the first ones, and others up to the last one that was consumed."""
PROBE_TEXT = (
    "The quick brown fox jumps over 13 lazy dogs.\n\tdef f(x): return x**2  # naïve\n"
    '从前，有一只狐狸住在森林里。"Yes," she said; café 3.14 — 🙂\r\n  Ünïcode  spaces\u3000and\u00a0more'
)
"""Text with spaces, digits, code, Chinese, accents, punctuation and an emoji."""


def make_proof(
    layout_check: CheckResult,
    train_data: object,
    tokenizer: Any,
    versions: Mapping[str, Any],
    run: Mapping[str, Any],
) -> dict[str, Any]:
    """Build the content of proof.json.

    Args:
        train_data: training data set; None if there is none.
        tokenizer: the run's tokenizer, if any.
        versions: result of ``run_record.versions``.
        run: facts about the run; ``samples`` counts consumed training samples.
    """
    return {
        "format": FORMAT,
        "layout_check": layout_check.to_dict(),
        "data": data_proof(train_data, run["samples"]),
        "tokenizer": tokenizer_proof(tokenizer),
        "versions": {name: versions[name] for name in ("python", "torch", "deepspeed", "numpy") if name in versions},
        "code": code_proof(versions.get("commit", "unknown"), run["script"]),
        "run": dict(run),
    }


def code_proof(commit: str, script: str) -> dict[str, str]:
    """Return the commit and two checksums: over all code files, and over the script."""
    path = Path(script)
    script_checksum = f"{zlib.crc32(path.read_bytes()):08x}" if path.is_file() else "unknown"
    return {
        "commit": commit,
        "checksum": f"{rank_consistency.code_checksum(script=''):08x}",
        "script": script_checksum,
    }


def script_name() -> str:
    """Return the running script's path, relative to the working directory if possible."""
    path = Path(sys.argv[0])
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(path)


def data_proof(dataset: Any, num_samples: int) -> dict[str, Any]:
    """Hash a data set's order and tokens.

    If samples cannot be hashed, which may be the case in a user's data set, the only entry is ``problem``, the reason.

    Args:
        num_samples: samples that the run has consumed.
    """
    if dataset is None or not num_samples:
        return {"problem": "no training data"}
    indices = sample_indices(num_samples)
    digest = hashlib.sha256()
    try:
        for index in indices:
            digest.update(f"sample {index}".encode())
            _update(digest, dataset[index])
        order = identity_text(dataset)
    except Exception as error:  # any error of the user's data set; the run itself is complete
        return {"problem": f"{type(error).__name__}: {error}"}
    return {"order": order, "num_hashed": len(indices), "samples_sha256": digest.hexdigest()}


def sample_indices(num_samples: int) -> list[int]:
    """Choose the samples to hash: the first ones, and others up to the last one, evenly spaced."""
    first = range(min(num_samples, NUM_SAMPLES // 2))
    spaced = (num_samples - 1 - round(idx * (num_samples - 1) / (NUM_SAMPLES // 2)) for idx in range(NUM_SAMPLES // 2))
    return sorted({*first, *spaced})


def _update(digest: Any, value: Any) -> None:
    """Add a sample to ``digest``. A sample is an array, a plain value, or a nested structure of them."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            digest.update(f"{key}:".encode())
            _update(digest, value[key])
    elif isinstance(value, str):
        digest.update(value.encode())
    elif isinstance(value, Sequence):
        for item in value:
            _update(digest, item)
    else:
        array = np.asarray(value)
        if array.dtype == object:
            raise TypeError(f"a sample must consist of arrays, numbers and texts, got {type(value).__name__}")
        is_integer = np.issubdtype(array.dtype, np.integer)
        digest.update(f"{array.shape}".encode())
        digest.update((array.astype(np.int64) if is_integer else array).tobytes())


def tokenizer_proof(tokenizer: Any) -> dict[str, Any]:
    """Return the tokenizer identity and a hash over the ids of ``PROBE_TEXT``."""
    if tokenizer is None:
        return {"problem": "no tokenizer"}
    identity = getattr(tokenizer, "identity", None)
    try:
        ids = [int(token) for token in tokenizer.encode(PROBE_TEXT)]
    except Exception as error:  # a vocabulary without text, or the user's tokenizer
        return {"identity": identity, "problem": f"{type(error).__name__}: {error}"}
    text = json.dumps(ids).encode()
    return {"identity": identity, "num_ids": len(ids), "probe_sha256": hashlib.sha256(text).hexdigest()}
