"""Traces of hybrid decoders with several mixers in any layout. ``delta_runs`` has those with the delta rule only."""

from __future__ import annotations

from examples.llama import pretrain_llama
from tests.helpers import layouts
from tests.helpers.parity_runs import ParityRuns

SIZES = (
    "--hidden-size 38 --num-attention-heads 4 --kv-channels 6 --ffn-hidden-size 28 --max-position-embeddings 16 "
    f"--seq-length {layouts.SEQ} --vocab-size {layouts.VOCAB} --init-method-std 0.1 --data-path none --device cpu "
    "--train-iters 20 --lr 1e-3 --warmup 0.1 --clip-grad 0"
)
LINEAR = (
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 6 --linear-value-head-dim 5 "
    "--linear-conv-kernel-dim 4"
)
MAMBA = "--mamba-num-heads 8 --mamba-head-dim 5 --mamba-num-groups 2 --mamba-state-dim 6"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16"
VARIANTS = {
    "kimi_linear": "--num-layers 4 --experimental-attention-variant kimi_delta --linear-attention-freq [1,0,1,1] "
    "--linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 6 --linear-value-head-dim 6 "
    "--multi-latent-attention --kv-lora-rank 9 --qk-head-dim 5 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
    f"--position-embedding-type none {EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.05 --moe-layer-freq [0,1,1,1]",
    "nemotron_h": f"--hybrid-layer-pattern M-*EM- {MAMBA} --activation squared-relu --position-embedding-type none "
    f"--num-query-groups 2 {EXPERTS}",
    "falcon_h1": f"--num-layers 4 --experimental-attention-variant parallel_mamba2 {MAMBA} --mamba-norm norm-first "
    "--mamba-norm-groups 1 --mamba-proj-bias --mamba-dt-limit-min 0.01 --mamba-dt-limit-max 1 --branch-multipliers "
    "attention-input=0.7,key=1.3,mamba-z=0.8,mamba-c=1.4,mamba-output=0.65,mlp-gate=1.25,mlp-output=0.55",
    "mixed": f"--hybrid-layer-pattern GM*E-G {LINEAR} {MAMBA} --rotary-percent 0.34 --apply-layernorm-1p "
    f"--attention-output-gate {EXPERTS} --moe-shared-expert-intermediate-size 16 --linear-norm-placement both",
}
"""Variants of published models. Options that no published model has are added, so that each option is in a variant."""


def runs_of(variant: str) -> ParityRuns:
    """Return the runs of a variant."""
    return ParityRuns(
        family="llama",
        script=pretrain_llama,
        model_flags=tuple(f"{SIZES} {VARIANTS[variant]}".split()),
        vocab_size=layouts.VOCAB,
        gas=2,
        flags_of_4_ranks="--hidden-size 36 --num-query-groups 4",
        document_flags="--reset-attention-mask",
    )


RUNS = {variant: runs_of(variant) for variant in VARIANTS}
EXTRA = f"--fp64 --clip-grad 0.5 {RUNS['mixed'].document_flags}"
"""Documents are separated: states and convolutions are reset at their starts."""
