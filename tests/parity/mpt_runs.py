"""Traces of a small MPT in any layout, as ``examples/mpt/pretrain_mpt.py`` trains it, for the parity tests."""

from __future__ import annotations

from examples.mpt import pretrain_mpt
from tests.helpers import layouts
from tests.helpers.parity_runs import ParityRuns

RUNS = ParityRuns(
    family="mpt",
    script=pretrain_mpt,
    model_flags=tuple(word for word in layouts.MODEL_FLAGS if word != "--hidden-bias"),
    vocab_size=layouts.VOCAB,
    gas=2,
)
VARIANTS = {
    "plain": "",
    "documents": "--reset-attention-mask --eod-mask-loss",
    "untied": "--untie-embeddings-and-output-weights --num-attention-heads 12 --kv-hidden-size 4",
    "clipped": "--clip-qkv 0.4 --alibi-bias-max 5 --checkpoint-activations --reset-attention-mask",
}
