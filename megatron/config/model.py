"""ModelConfig (sizes), FamilyConfig (base of a family's section, with the checks of a decoder), tokens per loss
chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from megatron.config.batch import BatchConfig
from megatron.config.data import DataConfig
from megatron.config.decoder import DecoderFeatures, feature_problems, unused_features
from megatron.config.option import Option, option

# What the model is: sizes and the arithmetic of its layers.


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderFeatures):
    """The sizes and parts of a model; a size of 0 is derived from the others when the object is made."""

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
        """Return the rows of the embedding over all tensor ranks, padding included.

        Raises:
            ValueError: the vocabulary is not known yet.
        """
        if self.vocab_size is None:
            raise ValueError(
                "model.vocab_size is not set yet: call config.with_vocab(size) after the tokenizer is built"
            )
        multiple = self.make_vocab_size_divisible_by * tensor
        return -(-self.vocab_size // multiple) * multiple


# What a family of models is: the base of its section, and the line by which it is registered.


@dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """The base of ``LlamaConfig`` and its like; as it is, the section of a decoder without flags of its own.

    A family's own flags are the fields of its class. What it says of the flags of others is in the tables below.
    """

    KIND: ClassVar[str] = "decoder"
    """decoder: predicts the next token of a text; encoder; encoder-decoder."""
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    """Field of any section -> its default in this family."""
    ADVICE: ClassVar[Mapping[str, str]] = {}
    """Field of another section that does not act in this family -> what a run that gives it is told to do.

    A field of the model's or the data's section that stands here is refused; one of another family's section is refused
    anyway, and its own ``elsewhere`` is said where none stands here.
    """
    HOLDS: ClassVar[Mapping[str, str]] = {}
    """Flag of another section that does not act in this family -> why what it asks for holds here: it is accepted."""
    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Flag of another trainer -> the reason for rejecting it that replaces the note in ``foreign_flags.tsv``."""
    IDENTITY: ClassVar[tuple[str, ...]] = ()
    """Own fields that two runs must share for one's weights to fit the other."""
    REFITTED: ClassVar[tuple[str, ...]] = ()
    """Those of ``IDENTITY`` with which the same weights fit and compute something else: --finetune may change them."""
    NO_IDENTITY: ClassVar[tuple[str, ...]] = ()
    """Fields of the model's section that they need not share in this family."""
    SIDES: ClassVar[tuple[str, ...]] = ()
    """Own fields that hold the layers of the sides, where the layers are not in one row; 0 stands for --num-layers."""
    READS_SPAN_FILES: ClassVar[bool] = False
    """Whether a corpus may be a set of CPM's three files."""

    @property
    def is_encoder_decoder(self) -> bool:
        return self.KIND == "encoder-decoder"

    @property
    def pads_samples(self) -> bool:
        """Whether samples may end in padding that is kept apart from their text."""
        return False

    def has_max_positions(self, model: ModelConfig) -> bool:
        """Return whether ``max_position_embeddings`` counts; 0 is then the longest sequence."""
        return True

    def summary(self, model: ModelConfig) -> str:
        """Return what is said of the model behind its sizes."""
        is_grouped = model.num_query_groups != model.num_attention_heads
        return f"{model.num_query_groups} heads of keys" if is_grouped else ""

    def total_layers(self, model: ModelConfig) -> int:
        """Return the transformer layers, of both sides."""
        return sum(getattr(self, side) for side in self.SIDES) if self.SIDES else model.num_layers

    def sequence_lengths(self, batch: BatchConfig) -> tuple[int, ...]:
        """Return the tokens that the model reads of a sample: one length, or those of encoder and decoder."""
        return (batch.seq_length,)

    def text_length(self, batch: BatchConfig) -> int:
        """Return the tokens of a corpus that one sample takes."""
        return batch.seq_length

    def resolved(self, model: ModelConfig, data: DataConfig) -> FamilyConfig:
        """Return this section with the numbers that follow from others."""
        return self

    def problems(self) -> Iterator[str]:
        """Yield what cannot be, looking at this section alone."""
        yield from ()

    def model_problems(self, config: Any) -> Iterator[str]:
        """Yield what cannot be of the model alone, wherever the settings of ``config``, a ``Config``, come from."""
        if self.KIND == "decoder":
            yield from feature_problems(config)

    def check(self, config: Any) -> Iterator[str]:
        """Yield what cannot be in ``config``, a ``Config``, and what was given and cannot act.

        As it is: a sequence that is longer than the model's positions, and of a decoder what cannot go together.
        """
        yield from self.model_problems(config)
        if self.KIND == "decoder":
            yield from unused_features(config)
        length, positions = config.batch.seq_length, config.model.max_position_embeddings
        if length > positions and config.model.has_position_ids:
            yield (
                f"--seq-length must not exceed --max-position-embeddings, got {length} and {positions}. "
                "Raise --max-position-embeddings, or shorten the sequence"
            )

    def notes(self, config: Any) -> Iterator[str]:
        """Yield what comes from defaults, cannot act, and does no harm."""
        yield from ()


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFamily:
    """The line of a family in ``megatron.models.registry``; stands in its folder's config.py as ``FAMILY``.

    Args:
        name: of its folder, of its section in a configuration, and in checkpoints.
        title: its name in messages.
        program: that trains it, from the root of the repository.
        config: its section.
        length: of a sample, where a plan is not told one; of an encoder-decoder, what the encoder reads.
        vocabulary: the same of its tokens.
        recipe: what its run script says of the model where the user does not: plans begin with the same.
        follows: own field or field of the model that follows from others -> its flag: told with a plan.
        heads: width -> heads of published sizes that the rule of widths does not give.
        variables: variable of its run script -> the field that it sets, beside those that all have.
        benchmark_flags: what the small models that the planner times have beside the recipe; none drops anything.
        layer_lists: kind of unit -> the attribute of the model that holds its layers.
    """

    name: str
    title: str
    program: str
    config: type[FamilyConfig]
    length: int = 2048
    vocabulary: int = 50304
    recipe: tuple[str, ...] = ()
    follows: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[int, int] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    benchmark_flags: str = ""
    layer_lists: Mapping[str, str] = field(default_factory=lambda: {"layer": "layers"})

    @property
    def kind(self) -> str:
        """decoder, encoder or encoder-decoder."""
        return self.config.KIND

    @property
    def run_script(self) -> str:
        """The script that starts its program."""
        return self.program.replace("pretrain_", "run_").replace(".py", ".sh")

    @property
    def package(self) -> str:
        """The folder that holds its parts, as a dotted name."""
        return self.config.__module__.rpartition(".")[0]

    @property
    def prefix(self) -> str:
        """What the names of its classes begin with: Llama of LlamaConfig, LlamaModel, LlamaModelPipe."""
        return self.config.__name__.removesuffix("Config")

    @property
    def has_section(self) -> bool:
        """Whether it has flags of its own."""
        return bool(fields(self.config))

    def takes(self, option: Option, section: str, *, is_own: bool) -> bool:
        """Return whether a run takes a flag of ``section``.

        Args:
            is_own: the section is that of a family, this one or another.
        """
        if is_own:
            return section == self.name
        return option.name not in self.config.ADVICE and option.family_kind in ("", self.kind)

    def advice(self, option: Option) -> str:
        """Return what a run, which does not take this flag, is told to do."""
        return self.config.ADVICE.get(option.name, option.elsewhere)


# For how many tokens at a time the loss makes logits: one rule for training and for the estimate of its memory.
#
# It looks at the micro-batch and the whole vocabulary, never at the layout or the schedule, so that all layouts compute
# the same sums. A chunk is small on a CPU, where it shall stay in the caches, and larger on other devices, where the
# gradient of the table is read and written once for each chunk.
#
# Chunks hold the gradient of the table, [v, h], beside logits of c tokens, in place of logits and softmax of n:
#
# | bytes / v of one rank | together | in chunks | less from |
# |---|---|---|---|
# | fp32 | 8 n | 4 c + 4 h, of several ranks 8 c + 4 h | n = c + h / 2 |
# | 16 bits | 10 n | 6 c + 6 h, of several ranks 10 c + 6 h | n = c + 0.6 h |
# | ... for each micro-batch that waits for its backward | 4 n | 4 h | n = h |
#
# Where ``n > c + h`` chunks hold less in each of these, and it is the rule. It leaves out the gradient of the hidden
# states, n h numbers on every rank, which counts where v/t is no more than a few h; the
# estimate of memory (``megatron.models.common.decoder_cost``) has all.

WHOLE = 0
"""What ``tokens_at_once`` returns where the logits of all tokens are made together and kept for backward."""
SMALL = 2**22
"""Logits of a micro-batch, over the whole vocabulary, up to which they are made together unless a flag says more."""
ON_CPU, ELSEWHERE = 256, 4096
"""Tokens of a chunk unless a flag says more; see docs/experiments.md."""


def tokens_at_once(asked: int | None, num_tokens: int, vocab_size: int, hidden_size: int, *, is_on_cpu: bool) -> int:
    """Return the tokens of the largest chunk of a micro-batch of ``num_tokens``, or WHOLE.

    Args:
        asked: tokens of a chunk at most, 0 to make all logits together, None to decide here.
    """
    if asked is None:
        chunk = ON_CPU if is_on_cpu else ELSEWHERE
        is_worth_it = num_tokens * vocab_size > SMALL and num_tokens > chunk + hidden_size
        asked = chunk if is_worth_it else WHOLE
    if asked == WHOLE or num_tokens == 0:
        return WHOLE
    return -(-num_tokens // -(-num_tokens // asked))  # chunks of one size, as far as it divides
