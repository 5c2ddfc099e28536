"""Traces of Qwen 3's, Gemma's and OLMo 2's decoder in any layout, every feature on, for the parity tests."""

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
    "qwen3": "--qk-norm head --tie-embeddings-and-output-weights --rotary-scaling yarn --rotary-scaling-factor 4 "
    "--rotary-original-positions 8 --rotary-beta-fast 2 --rotary-beta-slow 0.1 "
    "--window-size 5 --window-attn-skip-freq [0,1,1,0]",
    "gemma": "--activation gated-gelu --apply-layernorm-1p --norm-placement both --scale-embeddings --qk-norm head "
    "--tie-embeddings-and-output-weights --window-size 4 --window-attn-skip-freq 3 --softmax-scale 0.2 "
    "--attn-logit-softcapping 1.5 --final-logit-softcapping 2.5 --rotary-scaling linear --rotary-local-base 50",
    "olmo2": "--norm-placement after --qk-norm all --add-qkv-bias --rotary-percent 0.6 --window-size 6",
}
"""Each with more than its model has, so that every feature is in one of them."""


def runs_of(variant: str) -> ParityRuns:
    """Return the runs of a variant."""
    return ParityRuns(
        family="llama",
        script=pretrain_llama,
        model_flags=tuple(f"{SIZES} {VARIANTS[variant]}".split()),
        vocab_size=layouts.VOCAB,
        gas=2,
        flags_of_4_ranks="--num-attention-heads 8 --num-query-groups 4 --hidden-size 36",
        document_flags="--reset-attention-mask --reset-position-ids",
    )


RUNS = {variant: runs_of(variant) for variant in VARIANTS}
EXTRA = f"--fp64 --clip-grad 0.5 {RUNS['qwen3'].document_flags}"
"""Documents are apart, and their positions begin anew."""
