"""Names of control tokens in published vocabularies, and text that spells one."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator

EOD_NAMES = (
    *("<|endoftext|>", "<eod>", "<|end_of_text|>", "[EOD]", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    *("<EOS_TOKEN>", "[EOS]", "[SEP]"),
)
"""Names of the end-of-document token; the first one in the vocabulary is used. See ``Tokenizer.eod_name``."""
NOT_OF_CHATS = ("[SEP]",)
FORMER_EOD_NAMES = ("<|endoftext|>", "<eod>", "<|end_of_text|>", "[EOD]", "</s>", "[SEP]")
"""Names from which versions up to 8c23b9e6 took the first one in the vocabulary, also a tag such as Gemma's </s>."""
NEW_NAMES = ("<\uff5cend\u2581of\u2581sentence\uff5c>", "<EOS_TOKEN>")
"""Names that versions up to 8c23b9e6 did not look for; the file digest of an identity leaves them out."""
BY_NAME = "by-name"
"""Value of --eod-token that selects the rule of ``FORMER_EOD_NAMES``, which older runs keep."""
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")
"""Names of the padding token, as above."""
UNK_NAMES = ("<unk>", "[UNK]", "<|unk|>")
"""Names of the token for what the vocabulary does not have, as above."""
SENTINEL_NAMES = ("<extra_id_{}>", "<s_{}>")
"""Names of the tokens that stand for spans, T5's and CPM's; those of one kind, counted from 0 without a gap."""
FIM_NAMES = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<PRE>", "<MID>", "<SUF>"),
)
"""Names of the three tokens of fill-in-the-middle, by spelling."""
OTHER_NAMES = (
    *("<s>", "<bos>", "<eos>", "</d>", "<cls>", "<sep>", "<mask>", "<bod>", "<eop>"),
    *("[CLS]", "[MASK]", "[BOS]", "[EOS]", "[gMASK]"),
    *("<|startoftext|>", "<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<|sep|>", "<|cls|>"),
    *("<fim_pad>", "<|fim_pad|>", "<EOT>"),
)
"""Names of other control tokens."""
_MOST_SENTINELS = 512


def all_names() -> Iterator[str]:
    """Yield each name that a control token may have."""
    yield from (*EOD_NAMES, *PAD_NAMES, *UNK_NAMES, *OTHER_NAMES)
    yield from (name for spelling in FIM_NAMES for name in spelling)
    yield from (name.format(number) for name in SENTINEL_NAMES for number in range(_MOST_SENTINELS))


class Spellings:
    """The spellings of some control tokens.

    Args:
        names: of two characters or more; a name of one character cannot be cut.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = tuple(sorted(names, key=lambda name: (-len(name), name)))
        any_name = "|".join(map(re.escape, self.names))
        self._common_start = os.path.commonprefix(self.names)
        self._any = re.compile(any_name)
        self._each_start = re.compile(f"(?={any_name})")

    def __bool__(self) -> bool:
        return bool(self.names)

    def is_in(self, text: str) -> bool:
        """Whether ``text`` spells a control token."""
        return bool(self.names) and self._common_start in text and self._any.search(text) is not None

    def cut(self, text: str) -> list[str]:
        """Return ``text`` cut behind the first character of each spelling, those that overlap too."""
        if not self.is_in(text):
            return [text]
        cuts = [0, *(found.start() + 1 for found in self._each_start.finditer(text)), len(text)]
        return [text[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]
