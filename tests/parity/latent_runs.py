"""Traces of decoders with multi-latent attention in any layout, for the parity tests."""

from __future__ import annotations

from examples.llama import pretrain_llama
from tests.helpers import layouts
from tests.helpers.parity_runs import ParityRuns

SIZES = (
    "--num-layers 4 --hidden-size 38 --num-attention-heads 4 --ffn-hidden-size 28 --max-position-embeddings 16 "
    f"--seq-length {layouts.SEQ} --vocab-size {layouts.VOCAB} --init-method-std 0.1 --data-path none --device cpu "
    "--train-iters 20 --lr 1e-3 --warmup 0.1 --clip-grad 0 --multi-latent-attention --kv-lora-rank 9 --qk-head-dim 5 "
    "--qk-pos-emb-head-dim 4"
)
YARN = (
    "--rotary-scaling yarn --rotary-scaling-factor 4 --rotary-original-positions 8 --rotary-beta-fast 2 "
    "--rotary-beta-slow 0.1 --mscale 1.3 --mscale-all-dim 0.7"
)
VARIANTS = {
    "experts": f"--q-lora-rank 7 --v-head-dim 3 {YARN} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 14 "
    "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --moe-aux-loss-coeff 0.05 "
    "--moe-shared-expert-intermediate-size 14 --moe-layer-freq [0,1,1,1]",
    "dense": "--v-head-dim 11 --tie-embeddings-and-output-weights --window-size 6 --window-attn-skip-freq 2",
}
"""A DeepSeek-V3 in small; and dense layers without a query latent, with values longer than keys."""


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
EXTRA = f"--fp64 --clip-grad 0.5 {RUNS['dense'].document_flags}"
"""Documents are separated, and their positions restart."""
