"""--pipeline-model-parallel-layout: Megatron's notation for the layers in each virtual stage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

# Example: ``Et*3|(tt|)*29t|mL``. E is the embedding, t a transformer layer, m a multi-token prediction layer, L the
# head with its norm and the loss. ``|`` separates virtual stages, in the order of the model. ``*n`` repeats the letter
# or the bracket before it. Commas are ignored. ``megatron.config.mtp`` checks that every m is next to L.
#
# Source: Megatron-LM, --pipeline-model-parallel-layout.

FLAG = "--pipeline-model-parallel-layout"
_REPEATED = re.compile(r"(?:\(([^()]*)\)|([A-Za-z]))\*(\d+)")


def parse_layout(text: str) -> list[str]:
    """Parse the letters for each virtual stage, such as ["Ettt", "tt", "L"].

    Raises:
        ValueError: the notation is invalid, a virtual stage is empty, E and L are not exactly at the two ends, or a t
            follows an m.
    """
    flat = re.sub(r"[\s,]", "", text)
    while (shorter := _REPEATED.sub(lambda match: (match[1] or match[2] or "") * int(match[3]), flat)) != flat:
        flat = shorter
    chunks = flat.split("|")
    if chunks[-1] == "" and len(chunks) > 1:
        chunks.pop()  # a bar may also end the last virtual stage
    letters = "".join(chunks)
    if re.fullmatch(r"Et+m*L", letters) is None:
        raise ValueError(
            f"{FLAG} must be E, layers t, multi-token prediction layers m if there are any, and L, with | between "
            f"chunks and *n for repetition, such as Et*3|(tt|)*2t|L, got {text!r}"
        )
    if not all(chunks):
        raise ValueError(
            f"each chunk of {FLAG} must have a layer, E or L, got none in chunk {chunks.index('')} of {text!r}"
        )
    return chunks


def num_layers(chunks: Sequence[str]) -> int:
    """Count the transformer layers in all virtual stages."""
    return sum(chunk.count("t") for chunk in chunks)


def num_mtp_layers(chunks: Sequence[str]) -> int:
    """Count the multi-token prediction layers in all virtual stages."""
    return sum(chunk.count("m") for chunk in chunks)


def layout_bounds(chunks: Sequence[str]) -> list[int]:
    """Compute the bounds of a decoder's virtual stages in units.

    E and each layer letter stand for one unit, and L stands for two units, the final norm and the head. With
    multi-token prediction, the embedding of future tokens is one more unit, in L's virtual stage.
    """
    num_last_units = 2 if num_mtp_layers(chunks) else 1
    return [0, *accumulate(len(chunk) + num_last_units * ("L" in chunk) for chunk in chunks)]
