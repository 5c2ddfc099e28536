"""Names of control tokens: what those of a vocabulary are called, whoever made it."""

from __future__ import annotations

from collections.abc import Iterator

EOD_NAMES = ("<|endoftext|>", "<eod>", "<|end_of_text|>", "[EOD]", "</s>", "[SEP]")
"""Names of the end-of-document token, the first that is in the vocabulary counts."""
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
