"""Traces of a small BERT in any layout, as ``examples/bert/pretrain_bert.py`` trains it, for the parity tests."""

from __future__ import annotations

from examples.bert import pretrain_bert
from tests.helpers.parity_runs import ParityRuns

VOCAB = 109
SIZES = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --ff-hidden-size 40 --init-method-std 0.1 "
    f"--vocab-size {VOCAB} --attention-dropout 0 --hidden-dropout 0 --data-path none --device cpu --train-iters 20 "
    "--lr 1e-3 --warmup 0.1 --clip-grad 0.5 --short-seq-prob 0.4"
).split()
RUNS = ParityRuns(
    family="bert", script=pretrain_bert, model_flags=tuple(SIZES), vocab_size=VOCAB, gas=4, document_flags=""
)
VARIANTS = {
    "pairs": "--fp64",
    "words": "--fp64 --bert-no-binary-head --whole-word-masking --short-seq-prob 0 --checkpoint-activations",
    "pairs of whole words": "--fp64 --whole-word-masking",
}
