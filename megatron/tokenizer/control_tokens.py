"""Names of control tokens in published vocabularies, and detection of their spellings in texts."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator

EOD_NAMES = (
    *("<|endoftext|>", "<eod>", "<|end_of_text|>", "[EOD]", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    *("<EOS_TOKEN>", "[EOS]", "[SEP]"),
)
"""Names of the end-of-document token in order of preference; see ``Tokenizer.eod_name``."""
NOT_CHAT_EOD_NAMES = ("[SEP]",)
FORMER_EOD_NAMES = ("<|endoftext|>", "<eod>", "<|end_of_text|>", "[EOD]", "</s>", "[SEP]")
"""Names of the end-of-document token in versions up to 8c23b9e6, which used the first name in the vocabulary, even if
it was an HTML tag such as Gemma's </s>."""
NEW_NAMES = ("<\uff5cend\u2581of\u2581sentence\uff5c>", "<EOS_TOKEN>")
"""Names that versions up to 8c23b9e6 did not know; they are excluded from the file digest of an identity."""
BY_NAME = "by-name"
"""Value of --eod-token that selects the rule of ``FORMER_EOD_NAMES``, for runs of older versions."""
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")
"""Names of the padding token in order of preference."""
UNK_NAMES = ("<unk>", "[UNK]", "<|unk|>")
"""Names of the unknown token in order of preference."""
SENTINEL_NAMES = ("<extra_id_{}>", "<s_{}>")
"""Name patterns of the sentinel tokens of T5 and CPM; the first existing pattern is used, with indices from 0."""
FIM_NAMES = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<PRE>", "<MID>", "<SUF>"),
)
"""Names of the three tokens of fill-in-the-middle in different vocabularies."""
OTHER_NAMES = (
    *("<s>", "<bos>", "<eos>", "</d>", "<cls>", "<sep>", "<mask>", "<bod>", "<eop>"),
    *("[CLS]", "[MASK]", "[BOS]", "[EOS]", "[gMASK]"),
    *("<|startoftext|>", "<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<|sep|>", "<|cls|>"),
    *("<fim_pad>", "<|fim_pad|>", "<EOT>"),
)
"""Names of other control tokens."""
_MAX_SENTINELS = 512


def all_names() -> Iterator[str]:
    """Yield all known control-token names."""
    yield from (*EOD_NAMES, *PAD_NAMES, *UNK_NAMES, *OTHER_NAMES)
    yield from (name for spelling in FIM_NAMES for name in spelling)
    yield from (name.format(idx) for name in SENTINEL_NAMES for idx in range(_MAX_SENTINELS))


class Spellings:
    """Spellings of several control tokens.

    Args:
        names: names with at least two characters; shorter names cannot be split.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = tuple(sorted(names, key=lambda name: (-len(name), name)))
        any_name = "|".join(map(re.escape, self.names))
        self._common_start = os.path.commonprefix(self.names)
        self._any_pattern = re.compile(any_name)
        self._start_pattern = re.compile(f"(?={any_name})")

    def __bool__(self) -> bool:
        return bool(self.names)

    def is_in(self, text: str) -> bool:
        """Return True if ``text`` spells a control token."""
        return bool(self.names) and self._common_start in text and self._any_pattern.search(text) is not None

    def split(self, text: str) -> list[str]:
        """Split ``text`` after the first character of each spelling, including overlapping spellings."""
        if not self.is_in(text):
            return [text]
        bounds = [0, *(match.start() + 1 for match in self._start_pattern.finditer(text)), len(text)]
        return [text[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)]
