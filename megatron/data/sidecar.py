"""``PREFIX.meta.json``: what the pair ``.bin/.idx`` cannot say itself. Other readers ignore it; ours works without."""

from __future__ import annotations

import dataclasses
import json
import zlib
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


def read(path: Path, index: bytes) -> Sidecar | None:
    """Return the sidecar at ``path``, or None where there is none.

    Raises:
        DataError: unreadable, of another format, or it belongs to another ``.idx``.
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
    if sidecar.idx_crc32 != zlib.crc32(index):
        raise DataError(
            f"{path}: describes another .idx (crc32 {sidecar.idx_crc32:08x}) than the one beside it "
            f"({zlib.crc32(index):08x}). Delete it if the .bin and .idx are right, else build all three again."
        )
    return sidecar
