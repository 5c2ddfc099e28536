"""Tiny models with unusual sizes, described by Megatron-LM's flags and by megatron-core's constructor arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCAB, SEQ, EOD = 102, 12, 0
MICRO_BATCH, NUM_MICRO_BATCHES, STEPS = 2, 2, 20
GLOBAL_BATCH = MICRO_BATCH * NUM_MICRO_BATCHES
WARMUP_STEPS, LR, MIN_LR, WEIGHT_DECAY, CLIP_GRAD, BETA_2 = 3, 3e-3, 1e-4, 0.1, 0.5, 0.95
COMMON_FLAGS = (
    f"--num-layers 2 --seq-length {SEQ} --max-position-embeddings 14 "
    "--make-vocab-size-divisible-by 1 --attention-dropout 0 --hidden-dropout 0 "
    f"--micro-batch-size {MICRO_BATCH} --global-batch-size {GLOBAL_BATCH} --train-iters {STEPS} "
    f"--lr {LR} --min-lr {MIN_LR} --lr-decay-style cosine --lr-warmup-iters {WARMUP_STEPS} "
    f"--weight-decay {WEIGHT_DECAY} --clip-grad {CLIP_GRAD} --adam-beta2 {BETA_2} --data-path none --device cpu"
)
COMMON_CONFIG = {"num_layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}


@dataclass(frozen=True)
class TrainingCase:
    """A model and the masks of its data.

    Args:
        flags: flags of Megatron-LM's pretrain_gpt.py, in addition to ``COMMON_FLAGS``; our program reads them.
        config: arguments of megatron-core's ``TransformerConfig`` for the same model, beyond ``COMMON_CONFIG``.
            "activation" names the activation function.
        model: arguments of megatron-core's ``GPTModel``.
        masks: arguments of megatron-core's function of masks and positions that are True.
        sequence_parallel: sequence parallelism in addition to tensor parallelism.
        uses_batch_shares: our load-balancing loss uses the experts' shares of the micro-batch, as in Megatron, instead
            of their shares of the previous global batch.
        vocab: our number of tokens; megatron-core has ``VOCAB`` rows, the last of which are padding.
        has_exact_constants: False if megatron-core rounds a constant of a formula to 8 digits.
    """

    flags: str
    config: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    masks: tuple[str, ...] = ()
    sequence_parallel: bool = False
    uses_batch_shares: bool = False
    vocab: int = VOCAB
    has_exact_constants: bool = True

    @property
    def is_gated(self) -> bool:
        """True if the feed-forward layers have a gate."""
        return bool(self.config.get("gated_linear_unit"))

    def flags_of_layout(self, tensor: int) -> list[str]:
        """Return our command line for ``tensor`` tensor ranks."""
        layout = f"--tensor-model-parallel-size {tensor}"
        layout += " --sequence-parallel" if self.sequence_parallel and tensor > 1 else ""
        return f"{COMMON_FLAGS} --vocab-size {self.vocab} {self.flags} {layout}".split()


_LLAMA_LAYERS = {
    "normalization": "RMSNorm", "layernorm_epsilon": 1e-3, "gated_linear_unit": True, "activation": "silu",
    "bias_activation_fusion": True, "add_bias_linear": False,
}  # fmt: skip
_LLAMA_FLAGS = (
    "--normalization RMSNorm --norm-epsilon 1e-3 --swiglu --disable-bias-linear --position-embedding-type rope"
)
_GPT2_CONFIG = {"hidden_size": 36, "num_attention_heads": 6, "ffn_hidden_size": 50}
_GPT2_FLAGS = "--hidden-size 36 --num-attention-heads 6 --ffn-hidden-size 50"
_MIXTRAL_FLAGS = (
    f"{_LLAMA_FLAGS} --hidden-size 38 --num-attention-heads 2 --kv-channels 10 --ffn-hidden-size 26 "
    "--untie-embeddings-and-output-weights --num-experts 5 --moe-router-topk 2"
)
_MIXTRAL_CONFIG = {
    **_LLAMA_LAYERS, "hidden_size": 38, "num_attention_heads": 2, "kv_channels": 10, "ffn_hidden_size": 26,
    "num_moe_experts": 5, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
CASES = {
    "gpt2": TrainingCase(
        f"{_GPT2_FLAGS} --reset-position-ids --reset-attention-mask --eod-mask-loss",
        {**_GPT2_CONFIG, "bias_activation_fusion": True},
        {"share_embeddings_and_output_weights": True},
        masks=("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
        has_exact_constants=False,  # of tanh GELU: sqrt(2 / pi)
    ),
    "gpt2-gelu": TrainingCase(
        f"{_GPT2_FLAGS} --no-bias-gelu-fusion", _GPT2_CONFIG, {"share_embeddings_and_output_weights": True}
    ),
    "gpt2-padded": TrainingCase(
        f"{_GPT2_FLAGS} --no-bias-gelu-fusion",
        _GPT2_CONFIG,
        {"share_embeddings_and_output_weights": True},
        vocab=VOCAB - 1,
    ),
    "llama": TrainingCase(
        f"{_LLAMA_FLAGS} --hidden-size 36 --num-attention-heads 6 --ffn-hidden-size 54 --group-query-attention "
        "--num-query-groups 2 --untie-embeddings-and-output-weights --rotary-base 300 --calculate-per-token-loss "
        "--eod-mask-loss",
        {
            **_LLAMA_LAYERS, "hidden_size": 36, "num_attention_heads": 6, "ffn_hidden_size": 54, "num_query_groups": 2,
            "calculate_per_token_loss": True,
        },
        {"position_embedding_type": "rope", "rotary_base": 300},
        masks=("eod_mask_loss",),
        sequence_parallel=True,
    ),
    "qwen3": TrainingCase(
        f"{_LLAMA_FLAGS} --hidden-size 38 --num-attention-heads 6 --kv-channels 10 --ffn-hidden-size 54 "
        "--group-query-attention --num-query-groups 2 --qk-layernorm --rotary-base 1000 --eod-mask-loss",
        {
            **_LLAMA_LAYERS, "hidden_size": 38, "num_attention_heads": 6, "kv_channels": 10, "ffn_hidden_size": 54,
            "num_query_groups": 2, "qk_layernorm": True,
        },
        {"position_embedding_type": "rope", "rotary_base": 1000, "share_embeddings_and_output_weights": True},
        masks=("eod_mask_loss",),
    ),
    "mixtral": TrainingCase(
        f"{_MIXTRAL_FLAGS} --moe-z-loss-coeff 1e-2 --moe-aux-loss-coeff 0",
        {**_MIXTRAL_CONFIG, "moe_z_loss_coeff": 1e-2, "moe_router_load_balancing_type": "none"},
        {"position_embedding_type": "rope"},
        sequence_parallel=True,
    ),
    "mixtral-sequence-balanced": TrainingCase(
        f"{_MIXTRAL_FLAGS} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
        {**_MIXTRAL_CONFIG, "moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "seq_aux_loss"},
        {"position_embedding_type": "rope"},
        sequence_parallel=True,
    ),
    "mixtral-globally-balanced": TrainingCase(
        f"{_MIXTRAL_FLAGS} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
        {**_MIXTRAL_CONFIG, "moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "global_aux_loss"},
        {"position_embedding_type": "rope"},
    ),
    "sinkhorn": TrainingCase(
        f"{_MIXTRAL_FLAGS} --moe-router-load-balancing-type sinkhorn",
        {**_MIXTRAL_CONFIG, "moe_router_load_balancing_type": "sinkhorn"},
        {"position_embedding_type": "rope"},
    ),
    "sinkhorn-top-1": TrainingCase(
        f"{_MIXTRAL_FLAGS} --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn",
        {**_MIXTRAL_CONFIG, "moe_router_topk": 1, "moe_router_load_balancing_type": "sinkhorn"},
        {"position_embedding_type": "rope"},
    ),
    "mixtral-balanced": TrainingCase(
        f"{_MIXTRAL_FLAGS} --moe-aux-loss-coeff 0.1",
        {**_MIXTRAL_CONFIG, "moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss"},
        {"position_embedding_type": "rope"},
        uses_batch_shares=True,
    ),
}  # fmt: skip
