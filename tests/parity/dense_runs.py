"""Traces of decoders with the mechanisms of dense Hugging Face types in any layout, for the parity tests."""

from __future__ import annotations

from examples.llama import pretrain_llama
from tests.helpers import layouts
from tests.helpers.parity_runs import ParityRuns

SIZES = (
    "--num-layers 4 --hidden-size 38 --num-attention-heads 6 --num-query-groups 2 --kv-channels 10 "
    f"--ffn-hidden-size 28 --max-position-embeddings 16 --seq-length {layouts.SEQ} --vocab-size {layouts.VOCAB} "
    "--init-method-std 0.1 --data-path none --device cpu --train-iters 20 --lr 1e-3 --warmup 0.1 --clip-grad 0"
)
VARIANTS = {
    "cohere2": "--normalization LayerNorm --no-norm-bias --parallel-residual shared-norm --window-size 4 "
    "--window-attn-skip-freq 3 --no-rope-freq 3 --logit-scale 0.3 --tie-embeddings-and-output-weights "
    "--attention-temperature-scale 0.3 --attention-temperature-floor 3",
    "apertus": "--activation xielu --parallel-residual separate-norms --qk-norm per-head --apply-layernorm-1p "
    "--rotary-percent 0.6 --logit-scale 2",
    "phi3": "--rotary-scaling longrope --rotary-scaling-factor 4 --rotary-short-factors [1.0,1.2,1.5,2.0,3.0] "
    f"--rotary-long-factors [2.0,3.0,4.5,7.0,9.5] --rotary-original-positions {layouts.SEQ - 1} --norm-placement both "
    "--attention-temperature-scale 0.4 --attention-temperature-floor 2 --window-size 6",
}
"""Each with more than its model has, so that every mechanism is in one of them."""


def runs_of(variant: str) -> ParityRuns:
    """Return the runs of a variant."""
    return ParityRuns(
        family="llama",
        script=pretrain_llama,
        model_flags=tuple(f"{SIZES} {VARIANTS[variant]}".split()),
        vocab_size=layouts.VOCAB,
        gas=2,
        document_flags="--reset-attention-mask --reset-position-ids",
    )


RUNS = {variant: runs_of(variant) for variant in VARIANTS}
EXTRA = f"--fp64 --clip-grad 0.5 {RUNS['phi3'].document_flags}"
"""Documents are separate, and their positions restart."""
