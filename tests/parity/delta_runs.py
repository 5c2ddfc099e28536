"""Traces of hybrid decoders with the delta rule in any layout, for the parity tests."""

from __future__ import annotations

from examples.llama import pretrain_llama
from tests.helpers import layouts
from tests.helpers.parity_runs import ParityRuns

SIZES = (
    "--num-layers 4 --hidden-size 38 --num-attention-heads 4 --num-query-groups 2 --kv-channels 10 "
    f"--ffn-hidden-size 28 --max-position-embeddings 16 --seq-length {layouts.SEQ} --vocab-size {layouts.VOCAB} "
    "--init-method-std 0.1 --data-path none --device cpu --train-iters 20 --lr 1e-3 --warmup 0.1 --clip-grad 0"
)
HEADS = "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 6 --linear-value-head-dim 5"
VARIANTS = {
    "qwen3_next": f"--experimental-attention-variant gated_delta_net --linear-attention-freq 4 {HEADS} "
    "--attention-output-gate --rotary-percent 0.4 --qk-norm head --apply-layernorm-1p --num-experts 4 "
    "--moe-ffn-hidden-size 12 --moe-shared-expert-intermediate-size 12 --moe-aux-loss-coeff 0.1",
    "olmo_hybrid": f"--experimental-attention-variant gated_delta_net --linear-attention-freq [1,1,0,1] {HEADS} "
    "--linear-allow-neg-eigval --linear-norm-epsilon 1e-3 --linear-norm-placement before --norm-placement after "
    "--linear-conv-kernel-dim 3",
    "kimi_linear": "--experimental-attention-variant kimi_delta --linear-attention-freq [1,0,1,1] "
    "--linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 6 --linear-value-head-dim 6 "
    "--no-rope-freq 1",
    "ling": "--experimental-attention-variant kimi_delta --linear-attention-freq 2 --linear-num-key-heads 4 "
    "--linear-num-value-heads 4 --linear-key-head-dim 6 --linear-value-head-dim 6 --linear-full-rank-gates "
    "--linear-decay-limit 5 --linear-conv-kernel-dim 5",
}


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
EXTRA = f"--fp64 --clip-grad 0.5 {RUNS['ling'].document_flags}"
"""Documents are separated; with context parallelism they extend over several ranks."""
