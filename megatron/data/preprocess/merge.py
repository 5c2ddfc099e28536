"""The parts laid end to end, in the order of their units: the same bytes whoever made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.data.preprocess.parts import Part, Parts
from megatron.data.streamed_file import read_sizes
from megatron.data.token_writer import TokenFileWriter


def merge(writer: TokenFileWriter, parts: Parts, finished: Sequence[Part], on_bytes: Callable[[int], None]) -> None:
    """Write all of ``finished`` to ``writer``; ``on_bytes`` is told the bytes of tokens written so far."""
    done = 0
    with writer:
        for part in finished:
            size, crc32 = part.facts["bin"]
            writer.append(
                parts.path(part.unit, "bin"),
                read_sizes(parts.path(part.unit, "len")),
                num_tokens=part.counts.num_tokens,
                max_token_id=part.counts.max_token_id,
                crc32=crc32,
            )
            done += size
            on_bytes(done)
