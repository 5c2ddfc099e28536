"""Traces of a small T5 in any layout, trained by ``pretrain_t5.py``, for the parity tests."""

from __future__ import annotations

import pretrain_t5
from tests.helpers.parity_runs import ParityRuns

VOCAB = 109
MODEL_FLAGS = (
    "--enc-layers 2 --dec-layers 3 --hidden-size 32 --num-attention-heads 4 --enc-seq-length 24 "
    f"--vocab-size {VOCAB} --vocab-extra-ids 8 --attention-dropout 0 --hidden-dropout 0 --data-path none --device cpu "
    "--train-iters 20 --lr 1e-3 --warmup 0.1 --clip-grad 0.5"
).split()
RUNS = ParityRuns(
    family="t5",
    script=pretrain_t5,
    model_flags=tuple(MODEL_FLAGS),
    vocab_size=VOCAB,
    gas=4,
    defaults=pretrain_t5.DEFAULTS,
)
VARIANTS = {
    "t5": "",
    "v1.1": "--activation gated-gelu --untie-embeddings-and-output-weights --reset-attention-mask",
    "ul2": "--denoisers R,X,S --checkpoint-activations",
    "learned": "--position-embedding-type learned --hidden-bias --activation gelu --layernorm-epsilon 1e-5",
}
