"""ModelConfig: model sizes and the arithmetic of the layers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.decoder import DecoderFeatures
from megatron.config.option import option


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderFeatures):
    """Sizes and parts of a model; a size of 0 is derived from the others when the object is created."""

    architecture: str = option(
        "",
        "decoder to train: a family (gpt2, llama, mpt) or a Hugging Face model type (mistral, qwen2, qwen3, "
        "gemma2, gemma3_text, olmo2, smollm3, mixtral, qwen3_moe, qwen2_moe, glm4_moe, afmoe, gpt_oss, mimo_v2_flash, "
        "deepseek_v3, kimi_k2, deepseek_v2, glm4_moe_lite, youtu, minicpm3, dots1, olmoe, minimax_m2, ernie4_5_moe, "
        "olmo3, seed_oss, ernie4_5, hunyuan_v1_dense, ministral3, granite, phi3, stablelm, apertus, arcee, nemotron, "
        "cohere2, glm4, falcon_h1, granitemoehybrid, qwen3_next, qwen3_5_text, qwen3_5, qwen3_5_moe_text, qwen3_5_moe, "
        "olmo_hybrid, kimi_linear, bailing_hybrid); sets norms, positions, activation, biases and other parts, but no "
        "sizes",
        flag="--model",
        shown_default="the program's, or that of the run in --config",
        short="decoder: gpt2, llama, mpt, qwen3, ...",
        family_kind="decoder",
        elsewhere="it selects the decoder that pretrain_gpt2.py trains; remove it",
    )
    num_layers: int = option(
        4,
        "number of transformer layers; for T5, of the encoder and of the decoder",
        minimum=0,
        short="transformer layers",
    )
    hidden_size: int = option(256, "hidden size h", minimum=1, short="hidden size h")
    num_attention_heads: int = option(4, "number of attention heads a", minimum=1, short="attention heads a")
    kv_hidden_size: int = option(
        0,
        "head size d",
        minimum=1,
        shown_default="hidden-size / num-attention-heads",
        aliases=("--kv-channels",),
    )
    ff_hidden_size: int = option(
        0,
        "size f of the feed-forward layer",
        minimum=1,
        shown_default="4 x hidden-size",
        aliases=("--ffn-hidden-size",),
    )
    hidden_bias: bool = option(
        False,
        "biases in the linear layers, including experts and their router",
        constants={"--disable-bias-linear": False},
    )
    max_position_embeddings: int = option(
        0,
        "number of learned positions; for a model without learned positions the longest supported sequence",
        minimum=1,
        shown_default="the longest sequence",
    )
    layernorm_epsilon: float = option(
        1e-5,
        "epsilon added to the variance in layer norms and to the mean square in RMS norms",
        above=0,
        aliases=("--norm-epsilon",),
    )
    attention_dropout: float = option(0.1, "dropout of the attention probabilities", minimum=0, below=1)
    hidden_dropout: float = option(
        0.1,
        "dropout of the embedding and of each addition to the residual stream; in T5 with relative positions also "
        "of the activation and of the final norms",
        minimum=0,
        below=1,
    )
    layout_independent_dropout: bool = option(
        False,
        "drop the same elements in every layout, micro-batch size and schedule: the mask is a hash of the "
        "element's index in the global batch; slower",
    )
    init_method_std: float = option(0.02, "standard deviation of the initial weights", above=0)
    untie_embeddings: bool = option(
        False,
        "separate weights for the output head, instead of the word embedding's",
        flag="--untie-embeddings-and-output-weights",
        shown_default="tied, in LLaMA untied",
        constants={"--tie-embeddings-and-output-weights": False},
    )
    activation: str = option(
        "gelu",
        "activation of the feed-forward layer; gelu-tanh is GPT-2's approximation; a gated activation (gated-gelu "
        "uses gelu-tanh, gated-quick-gelu x sigmoid(1.702 x)) is multiplied by a second projection of the input; xielu "
        "has two learned parameters per layer and is supported in decoders without experts",
        choices=(
            "gelu",
            "gelu-tanh",
            "relu",
            "squared-relu",
            "silu",
            "gated-gelu",
            "gated-silu",
            "gated-quick-gelu",
            "xielu",
        ),  # fmt: skip
        constants={
            "--openai-gelu": "gelu-tanh",
            "--squared-relu": "squared-relu",
            "--quick-geglu": "gated-quick-gelu",
        },
    )
    make_vocab_size_divisible_by: int = option(
        1, "pad the vocabulary to a multiple of this and of --model-parallel-size; padded rows are masked", minimum=1
    )
    apply_residual_connection_post_layernorm: bool = option(
        False,
        "take the residual connection from the normalised input of attention and feed-forward layer instead of the "
        "input",
    )
    loss_chunk_tokens: int | None = option(
        None,
        "number of tokens per chunk for which the loss computes logits, so that the logits of a micro-batch are "
        "never in memory at once; 0: all tokens together",
        minimum=0,
        shown_default=(
            "256 on a CPU and 4096 on other devices if a micro-batch has more than 4 million logits and more tokens "
            "than the chunk and the hidden size together, otherwise 0"
        ),
    )
    z_loss: float = option(
        0.0,
        "weight of the auxiliary z-loss (log Z)^2 on the log-partition function (PaLM: 1e-4); logged separately, "
        "and excluded from evaluations",
        minimum=0,
        aliases=("--output-z-loss-coeff",),
    )
    loss_average: str = option(
        "token",
        "average of the losses of a step: token: over all tokens of the step; micro-batch: over the means of the "
        "micro-batches of all replicas, as Megatron-LM without --calculate-per-token-loss. Evaluations average "
        "over tokens",
        choices=("token", "micro-batch"),
    )
    vocab_size: int | None = option(
        None, "vocabulary size of the model", minimum=1, shown_default="the tokenizer's vocabulary"
    )

    def __post_init__(self) -> None:
        if not self.kv_hidden_size and self.num_attention_heads > 0:
            object.__setattr__(self, "kv_hidden_size", self.hidden_size // self.num_attention_heads)
        if not self.ff_hidden_size:
            object.__setattr__(self, "ff_hidden_size", 4 * self.hidden_size)
        super().__post_init__()

    @property
    def attention_size(self) -> int:
        """a x d: total width of all heads."""
        return self.num_attention_heads * self.kv_hidden_size

    def padded_vocab_size(self, tensor_size: int) -> int:
        """Count the embedding rows over all tensor ranks, including padding.

        Raises:
            ValueError: the vocabulary is not known yet.
        """
        if self.vocab_size is None:
            raise ValueError(
                "model.vocab_size is not set yet: call config.with_vocab(size) after the tokenizer is built"
            )
        multiple = self.make_vocab_size_divisible_by * tensor_size
        return -(-self.vocab_size // multiple) * multiple
