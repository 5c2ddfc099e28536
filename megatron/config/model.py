"""ModelConfig: sizes of the model and the arithmetic of its layers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.decoder import DecoderFeatures
from megatron.config.option import option


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderFeatures):
    """Sizes and parts of a model; a size of 0 is derived from the others when the object is created."""

    architecture: str = option(
        "",
        "the decoder to train: a family (gpt2, llama, mpt) or a Hugging Face model type (mistral, qwen2, qwen3, "
        "gemma2, gemma3_text, olmo2, mixtral, qwen3_moe, qwen2_moe, glm4_moe); sets norms, positions, activation, "
        "biases and other parts, but no sizes",
        flag="--model",
        shown_default="the program's, or that of the run in --config",
        short="decoder: gpt2, llama, mpt, qwen3, ...",
        family_kind="decoder",
        elsewhere="it selects the decoder that pretrain_gpt2.py trains; leave it out",
    )
    num_layers: int = option(4, "transformer layers; of T5, those of each side", minimum=0, short="transformer layers")
    hidden_size: int = option(256, "size h of the residual stream", minimum=1, short="hidden size h")
    num_attention_heads: int = option(4, "attention heads a", minimum=1, short="attention heads a")
    kv_hidden_size: int = option(
        0,
        "size d of one head",
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
    hidden_bias: bool = option(False, "give the linear layers biases", constants={"--disable-bias-linear": False})
    max_position_embeddings: int = option(
        0,
        "learned positions; of a model without a table of them the longest sequence that it is made for",
        minimum=1,
        shown_default="the longest sequence",
    )
    layernorm_epsilon: float = option(
        1e-5,
        "added to the variance in layer norms, to the mean square in RMS norms",
        above=0,
        aliases=("--norm-epsilon",),
    )
    attention_dropout: float = option(0.1, "dropout of attention probabilities", minimum=0, below=1)
    hidden_dropout: float = option(
        0.1,
        "dropout of the embedding and of what joins the residual stream; in T5 with relative positions also of the "
        "activation and of the final norms",
        minimum=0,
        below=1,
    )
    layout_independent_dropout: bool = option(
        False,
        "drop the same elements in every layout, micro-batch size and schedule, by a hash of which element of the "
        "global batch it is; slower",
    )
    init_method_std: float = option(0.02, "standard deviation of the initial weights", above=0)
    untie_embeddings: bool = option(
        False,
        "give the output head weights of its own instead of the word embedding's",
        flag="--untie-embeddings-and-output-weights",
        shown_default="tied, in LLaMA untied",
        constants={"--tie-embeddings-and-output-weights": False},
    )
    activation: str = option(
        "gelu",
        "activation of the feed-forward layer; gelu-tanh is the approximation that GPT-2 was trained with; a gated "
        "one multiplies the activation (gated-gelu: that approximation) with a second product of the input",
        choices=("gelu", "gelu-tanh", "relu", "squared-relu", "silu", "gated-gelu", "gated-silu"),
        constants={"--openai-gelu": "gelu-tanh", "--squared-relu": "squared-relu"},
    )
    make_vocab_size_divisible_by: int = option(
        1, "pad the vocabulary to a multiple of this and of --model-parallel-size; padded rows are masked", minimum=1
    )
    apply_residual_connection_post_layernorm: bool = option(
        False,
        "add to the normalised input of a layer's parts instead of the input itself",
    )
    loss_chunk_tokens: int | None = option(
        None,
        "tokens whose logits the loss makes at a time, so that they are never all in memory; 0: makes all together",
        minimum=0,
        shown_default="by the micro-batch: chunks of 256 tokens on a CPU and of 4096 elsewhere if it has more than "
        "4 million logits and more tokens than a chunk and the hidden size together, else all",
    )
    z_loss: float = option(
        0.0,
        "add this times (log Z)^2 to the loss of each token, Z being the sum of the exponentials of its logits, so "
        "that logits do not drift (PaLM has 1e-4); logged apart, and left out in evaluations",
        minimum=0,
        aliases=("--output-z-loss-coeff",),
    )
    loss_average: str = option(
        "token",
        "how the losses of a step are averaged; token: over all tokens of the step that count; micro-batch: over the "
        "micro-batches of all replicas, each the mean over its own tokens, as Megatron-LM does without "
        "--calculate-per-token-loss. Evaluations average over tokens",
        choices=("token", "micro-batch"),
    )
    vocab_size: int | None = option(
        None, "vocabulary of the model", minimum=1, shown_default="the tokenizer's vocabulary"
    )

    def __post_init__(self) -> None:
        if not self.kv_hidden_size and self.num_attention_heads > 0:
            object.__setattr__(self, "kv_hidden_size", self.hidden_size // self.num_attention_heads)
        if not self.ff_hidden_size:
            object.__setattr__(self, "ff_hidden_size", 4 * self.hidden_size)
        super().__post_init__()

    @property
    def attention_size(self) -> int:
        """a x d: the width of all heads together."""
        return self.num_attention_heads * self.kv_hidden_size

    def padded_vocab_size(self, tensor: int) -> int:
        """Return the number of embedding rows over all tensor ranks, including padding.

        Raises:
            ValueError: the vocabulary is not known yet.
        """
        if self.vocab_size is None:
            raise ValueError(
                "model.vocab_size is not set yet: call config.with_vocab(size) after the tokenizer is built"
            )
        multiple = self.make_vocab_size_divisible_by * tensor
        return -(-self.vocab_size // multiple) * multiple
