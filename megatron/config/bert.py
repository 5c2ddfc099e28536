"""What BERT adds: masked tokens, pairs of texts and whether the second follows the first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from megatron.config.family import FamilyConfig
from megatron.config.option import option

_option = partial(
    option, families=("bert",), elsewhere="it is for BERT; leave it out, or use examples/bert/pretrain_bert.py"
)


@dataclass(frozen=True, kw_only=True)
class BertConfig(FamilyConfig):
    """Masked language modelling, with the next-sentence task or without."""

    DEFAULTS: ClassVar = {"hidden_bias": True, "layernorm_epsilon": 1e-12}
    IDENTITY: ClassVar = ("binary_head",)

    binary_head: bool = _option(
        True,
        "train without the next-sentence task, on single texts",
        flag="",
        constants={"--bert-no-binary-head": False},
    )
    mask_prob: float = _option(
        0.15,
        "share of the text that is to be guessed",
        above=0,
        below=1,
        elsewhere_in={"t5": "use --noise-density"},
    )
    whole_word_masking: bool = _option(False, "mask all tokens of a word together")
    short_seq_prob: float = _option(
        0.1,
        "share of the samples whose text may be of any length from 2 on; they are padded",
        minimum=0,
        maximum=1,
        elsewhere_in={"t5": "every sample has the same length of text; leave it out"},
    )
