"""``PREFIX.meta.json``: what the pair ``.bin/.idx`` cannot say itself. Other readers ignore it; ours works without."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from megatron.errors import DataError

FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sidecar:
    """Facts about a pair of token files, written with it."""

    num_tokens: int
    num_documents: int
    max_token_id: int
    vocab_size: int
    tokenizer: str
    eod_id: int | None
    has_eod: bool
    bin_bytes: int
    bin_crc32: int
    idx_crc32: int
    format: int = FORMAT

    def to_json(self) -> bytes:
        return (json.dumps(dataclasses.asdict(self), indent=2) + "\n").encode()


def read(path: Path) -> Sidecar | None:
    """Return the sidecar at ``path``, or None where there is none.

    Raises:
        DataError: unreadable, or of another format.
    """
    try:
        fields = json.loads(path.read_bytes())
        sidecar = Sidecar(**fields)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Delete it, or build the data again.") from error
    if sidecar.format != FORMAT:
        raise DataError(f"{path}: format must be {FORMAT}, got {sidecar.format}. Build the data again, or delete it.")
    return sidecar


def check_belongs(sidecar: Sidecar, path: Path, *, num_documents: int, num_tokens: int, idx_crc32: int | None) -> None:
    """The sidecar read from ``path`` must describe the files beside it; ``idx_crc32`` None: theirs is not known.

    Raises:
        DataError: it describes others.
    """
    told = f"{sidecar.num_documents} documents of {sidecar.num_tokens} tokens"
    found = f"{num_documents} documents of {num_tokens} tokens"
    if idx_crc32 is not None and sidecar.idx_crc32 != idx_crc32:
        told, found = f"crc32 {sidecar.idx_crc32:08x}", f"{idx_crc32:08x}"
    if told != found:
        raise DataError(
            f"{path}: describes another .idx ({told}) than the one beside it ({found}). Delete it if the .bin and .idx "
            "are right, else build all three again."
        )
