"""--pipeline-model-parallel-layout: Megatron's notation for the layers of each piece of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

# Example: ``Et*3|(tt|)*29t|L``. E is the embedding, t a transformer layer, L the head with its norm and the loss. ``|``
# separates pieces, in the order of the model. ``*n`` repeats the letter or the bracket before it. Commas are ignored.
# Megatron's m, a multi-token prediction layer, is not supported.
#
# Source: Megatron-LM, --pipeline-model-parallel-layout.

FLAG = "--pipeline-model-parallel-layout"
_REPEATED = re.compile(r"(?:\(([^()]*)\)|([A-Za-z]))\*(\d+)")


def parse_layout(text: str) -> list[str]:
    """Return the letters of each piece, such as ["Ettt", "tt", "L"].

    Raises:
        ValueError: the notation is invalid, a piece is empty, or E and L are not exactly at the two ends.
    """
    flat = re.sub(r"[\s,]", "", text)
    while (shorter := _REPEATED.sub(lambda found: (found[1] or found[2] or "") * int(found[3]), flat)) != flat:
        flat = shorter
    pieces = flat.split("|")
    if pieces[-1] == "" and len(pieces) > 1:
        pieces.pop()  # a bar may also end the last piece
    letters = "".join(pieces)
    if re.fullmatch(r"Et+L", letters) is None:
        raise ValueError(
            f"{FLAG} must be E, layers t and L, with | between chunks and *n for repetition, such as Et*3|(tt|)*2t|L, "
            f"got {text!r}" + (": m (multi-token prediction) is not supported" if "m" in letters else "")
        )
    if not all(pieces):
        raise ValueError(
            f"each chunk of {FLAG} must have a layer, E or L, got none in chunk {pieces.index('')} of {text!r}"
        )
    return pieces


def num_layers(pieces: Sequence[str]) -> int:
    """Return the number of transformer layers in all pieces."""
    return sum(piece.count("t") for piece in pieces)


def layout_bounds(pieces: Sequence[str]) -> list[int]:
    """Return the bounds of the pieces of a decoder in units: embedding, layers, and two units (norm, head) for L."""
    return [0, *accumulate(len(piece) + ("L" in piece) for piece in pieces)]
