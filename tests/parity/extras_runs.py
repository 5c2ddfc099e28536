"""Traces of decoders with sinks, output gates, layers without rotary positions and biased experts in any layout."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from examples.llama import pretrain_llama
from megatron.models.common.attention_extras import Sinks
from megatron.mpu.shard import set_uninitialized, shard_of
from tests.helpers import layouts
from tests.helpers.parity_runs import ParityRuns

SIZES = (
    "--num-layers 4 --hidden-size 38 --num-attention-heads 6 --num-query-groups 2 --kv-channels 10 "
    f"--ffn-hidden-size 28 --max-position-embeddings 16 --seq-length {layouts.SEQ} --vocab-size {layouts.VOCAB} "
    "--init-method-std 0.1 --data-path none --device cpu --train-iters 20 --lr 1e-3 --warmup 0.1 --clip-grad 0"
)
VARIANTS = {
    "gpt_oss": "--softmax-type learnable --hidden-bias --window-size 5 --window-attn-skip-freq 2 --quick-geglu "
    "--activation-func-clamp-value 0.3 --glu-linear-offset 1 --rotary-scaling yarn --rotary-scaling-factor 4 "
    "--rotary-original-positions 8 --rotary-beta-fast 2 --rotary-beta-slow 0.1 --no-rotary-truncate --num-experts 4 "
    "--moe-ffn-hidden-size 12 --moe-aux-loss-coeff 0.1",
    "afmoe": "--attention-output-gate --norm-placement both --qk-norm head --window-size 5 --window-attn-skip-freq 2 "
    "--no-rope-freq 2 --scale-embeddings --num-experts 4 --moe-ffn-hidden-size 12 --moe-layer-freq [0,1,1,1] "
    "--moe-shared-expert-intermediate-size 12 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.05 --moe-router-topk-scaling-factor 1.5",
    "mimo": "--softmax-type learnable --sink-layers window --window-size 5 --window-attn-skip-freq [0,1,1,0] "
    "--v-head-dim 6 --num-attention-heads 8 --window-num-query-groups 4 --attention-value-scale 0.6 --add-qkv-bias "
    "--rotary-base 500 --rotary-local-base 100 --rotary-percent 0.67 --num-experts 4 --moe-ffn-hidden-size 12 "
    "--moe-layer-freq [0,1,1,1] --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    "dense": "--softmax-type off-by-one --attention-output-gate --add-qkv-bias --rotary-interleaved "
    "--rotary-percent 0.6 --qk-norm all --qk-norm-order after --no-rope-freq [0,1,0,0] "
    "--activation-func-clamp-value 0.3 --attn-logit-softcapping 1.5",
}
"""Each with more than its model has, so that every feature is in one of them."""


def model_provider() -> Any:
    """Return the model of this rank with sinks of 3 to 5: near 0, mistakes of a factor in the denominator are small."""
    model = pretrain_llama.model_provider()
    for module in model.modules():
        if isinstance(module, Sinks) and module.weight is not None:
            shard = shard_of(module.weight)
            module.weight.data = shard.narrow(torch.linspace(3.0, 5.0, shard.global_shape[0])).clone()
            set_uninitialized(module.weight, False)
    return model


SCRIPT = ModuleType("pretrain_extras")
SCRIPT.model_provider, SCRIPT.forward_step = model_provider, pretrain_llama.forward_step  # type: ignore[attr-defined]


def runs_of(variant: str) -> ParityRuns:
    """Return the runs of a variant."""
    return ParityRuns(
        family="llama",
        script=SCRIPT,
        model_flags=tuple(f"{SIZES} {VARIANTS[variant]}".split()),
        vocab_size=layouts.VOCAB,
        gas=2,
        document_flags="--reset-attention-mask --reset-position-ids",
    )


RUNS = {variant: runs_of(variant) for variant in VARIANTS}
EXTRA = f"--fp64 --clip-grad 0.5 {RUNS['dense'].document_flags}"
"""Documents are apart, and their positions begin anew."""
