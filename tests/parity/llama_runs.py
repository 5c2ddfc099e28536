"""Traces of a small LLaMA in any layout, as ``examples/llama/pretrain_llama.py`` trains it, for the parity tests."""

from __future__ import annotations

from examples.llama import pretrain_llama
from tests.helpers import layouts
from tests.helpers.parity_runs import ParityRuns

RUNS = ParityRuns(
    family="llama",
    script=pretrain_llama,
    model_flags=(*(word for word in layouts.MODEL_FLAGS if word != "--hidden-bias"), "--num-query-groups", "2"),
    vocab_size=layouts.VOCAB,
    gas=2,
    flags_of_4_ranks="--num-attention-heads 8 --num-query-groups 4",  # groups for 4 tensor ranks
    document_flags="--reset-attention-mask --reset-position-ids",
)
VARIANTS = {
    "plain": "--ff-hidden-size 40",
    "documents": "--reset-attention-mask --reset-position-ids --eod-mask-loss",
    "positions": "--reset-position-ids --hidden-bias --rotary-scaling llama3 --rotary-original-positions 8",
    "tied": "--tie-embeddings-and-output-weights --kv-hidden-size 6 --checkpoint-activations --reset-attention-mask",
}
