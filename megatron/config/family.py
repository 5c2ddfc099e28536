"""FamilyConfig, the base of a model family's section; ModelFamily, its registration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from megatron.config.batch import BatchConfig
from megatron.config.data import DataConfig
from megatron.config.decoder import feature_problems, unused_features
from megatron.config.model import ModelConfig
from megatron.config.option import Option

DECODER_PROGRAM, DECODER_FAMILY = "pretrain_gpt2.py", "gpt2"
"""The program that trains every decoder, and the family that it trains without ``--model``."""
DECODER_MODEL = "megatron.models.common.decoder:MODEL"
DECODER_PIPELINE = "megatron.models.common.pipeline:DecoderPipe"
DECODER_COSTS = "megatron.costs.decoder_cost:costs"
"""The parts of a decoder that is defined by settings of the common decoder."""


@dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """Base class of the family sections such as ``LlamaConfig``, and the section of decoders without their own flags.

    A subclass's fields are the family's own flags. The class variables below define how a family treats the flags
    of other sections.
    """

    KIND: ClassVar[str] = "decoder"
    """"decoder" (predicts the next token of a text), "encoder" or "encoder-decoder"."""
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    """Field of any section -> its default in this family."""
    ADVICE: ClassVar[Mapping[str, str]] = {}
    """Field of another section that has no effect in this family -> advice in the error if a run sets it.

    A field of the model or data section that is listed here is rejected. A field of another family's section is always
    rejected; if it is not listed here, the advice is its ``Option.elsewhere``.
    """
    ALWAYS_ON_FLAGS: ClassVar[Mapping[str, str]] = {}
    """Flag of another section that is accepted without effect -> reason: this family always behaves as it requests."""
    REJECTED_FLAGS: ClassVar[Mapping[str, str]] = {}
    """Flag of another trainer -> reason for rejecting it, which replaces the note in ``foreign_flags.tsv``."""
    IDENTITY: ClassVar[tuple[str, ...]] = ()
    """Fields of this section that two runs must share so that one can load the other's weights."""
    REFITTED: ClassVar[tuple[str, ...]] = ()
    """Fields of ``IDENTITY`` that --finetune may change: the weights load, but the outputs change."""
    NO_IDENTITY: ClassVar[tuple[str, ...]] = ()
    """Fields of the model section that two runs of this family need not share."""
    SIDES: ClassVar[tuple[str, ...]] = ()
    """Fields with the number of layers of encoder and decoder, for an encoder-decoder; 0 stands for --num-layers."""
    READS_SPAN_FILES: ClassVar[bool] = False
    """True if a corpus may be a set of CPM's three files."""

    @property
    def is_encoder_decoder(self) -> bool:
        return self.KIND == "encoder-decoder"

    @property
    def pads_samples(self) -> bool:
        """True if samples may end in padding tokens, to which the text does not attend."""
        return False

    def has_max_positions(self, model: ModelConfig) -> bool:
        """Check if ``max_position_embeddings`` is used; its default 0 then means the longest sequence."""
        return True

    def summary(self, model: ModelConfig) -> str:
        """Return the text that follows the model's sizes in the start table; "" for none."""
        if model.multi_latent_attention:
            return f"latents of {model.kv_lora_rank} + {model.qk_pos_emb_head_dim} elements"
        is_grouped = model.num_query_groups != model.num_attention_heads
        return f"{model.num_query_groups} key-value heads" if is_grouped else ""

    def total_layers(self, model: ModelConfig) -> int:
        """Count the transformer layers, on both sides for an encoder-decoder."""
        return sum(getattr(self, side) for side in self.SIDES) if self.SIDES else model.num_layers

    def sequence_lengths(self, batch: BatchConfig) -> tuple[int, ...]:
        """Return the tokens per sample that the model reads: one length, or the encoder and decoder lengths."""
        return (batch.seq_length,)

    def text_length(self, batch: BatchConfig) -> int:
        """Count the corpus tokens that one sample consumes."""
        return batch.seq_length

    def resolved(self, model: ModelConfig, data: DataConfig) -> FamilyConfig:
        """Return this section with derived values filled in."""
        return self

    def problems(self) -> Iterator[str]:
        """Yield an error message for each invalid value in this section."""
        yield from ()

    def model_problems(self, config: Any) -> Iterator[str]:
        """Yield an error message for each invalid model setting in ``config``, a ``Config``, from any source."""
        if self.KIND == "decoder":
            yield from feature_problems(config)

    def check(self, config: Any) -> Iterator[str]:
        """Yield an error message for each problem in ``config``, a ``Config``, including flags that have no effect.

        The base class checks that the sequence does not exceed the model's positions and, for a decoder, its features.
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
        """Yield a note for each default that is accepted although it has no effect."""
        yield from ()


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFamily:
    """A family of models: ``FAMILY`` in the config.py of its folder, listed in ``megatron.models.registry``.

    Its parts are dotted names ``module:object``, imported on first use, so that ``--help`` does not import torch. The
    types of the objects are in ``megatron.models.parts``.

    Args:
        name: its folder, configuration section, and name in checkpoints.
        title: its name in messages.
        config: its section.
        program: the program that trains it, relative to the repository root; decoders share one program.
        script: the run script that starts ``program``; "" for a decoder that ``run_gpt2.sh --model`` starts.
        length: the planner's default sample length, in tokens; for an encoder-decoder the encoder's length.
        vocabulary: the planner's default vocabulary size.
        recipe: model flags that its run script sets by default; the planner uses the same defaults.
        follows: derived field (in this section or in the model section) -> flag with which the planner's commands set
            the field explicitly.
        heads: hidden size -> head count, for published models that differ from the planner's general rule.
        variables: run script variable -> the field that it sets, in addition to the common variables.
        benchmark_flags: flags for the small models that the planner times, in addition to the recipe; without dropout.
        layer_lists: layer type -> the model attribute that contains these layers.
        model: the model without a pipeline, its sizes and initial weights (``ModelParts``).
        pipeline: the model class for pipeline stages (``PipelineClass``).
        costs: parameters, FLOPs and memory (``CostsOf``).
        data: how samples are made (``DataParts``); "" if they are consecutive tokens of the corpus.
        huggingface: the Hugging Face formats, one for each model type; "" for none.

    Raises:
        ValueError: a family that is not a decoder does not define its own model, pipeline or costs.
    """

    name: str
    title: str
    config: type[FamilyConfig]
    program: str = DECODER_PROGRAM
    script: str = ""
    length: int = 2048
    vocabulary: int = 50304
    recipe: tuple[str, ...] = ()
    follows: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[int, int] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    benchmark_flags: str = ""
    layer_lists: Mapping[str, str] = field(default_factory=lambda: {"layer": "layers"})
    model: str = DECODER_MODEL
    pipeline: str = DECODER_PIPELINE
    costs: str = DECODER_COSTS
    data: str = ""
    huggingface: str = ""

    def __post_init__(self) -> None:
        defaults = {"model": DECODER_MODEL, "pipeline": DECODER_PIPELINE, "costs": DECODER_COSTS}
        missing = [field_name for field_name, default in defaults.items() if getattr(self, field_name) == default]
        if missing and self.model_type != "decoder":
            raise ValueError(f"the family {self.name} is not a decoder and must define its own {', '.join(missing)}")

    @property
    def model_type(self) -> str:
        """decoder, encoder or encoder-decoder."""
        return self.config.KIND

    @property
    def run_script(self) -> str:
        """The script that starts its program."""
        return self.script or self.program.replace("pretrain_", "run_").replace(".py", ".sh")

    @property
    def command(self) -> str:
        """The program with the flag that selects this family."""
        return f"{self.program}{self._selection}"

    @property
    def run_command(self) -> str:
        """The run script with the flag that selects this family; without the flag if the family has its own script."""
        return self.run_script if self.script else f"{self.run_script}{self._selection}"

    @property
    def _selection(self) -> str:
        return f" --model {self.name}" if self.program == DECODER_PROGRAM and self.name != DECODER_FAMILY else ""

    @property
    def has_section(self) -> bool:
        """True if the family has its own flags."""
        return bool(fields(self.config))

    def accepts_option(self, option: Option, section: str, *, is_family_section: bool) -> bool:
        """Check if a run of this family accepts ``option`` in ``section``.

        Args:
            is_family_section: the section belongs to a family, this one or another.
        """
        if is_family_section:
            return section == self.name
        return option.name not in self.config.ADVICE and option.family_kind in ("", self.model_type)

    def advice(self, option: Option) -> str:
        """Return the advice for a user who sets ``option``, a flag that this family does not accept."""
        return self.config.ADVICE.get(option.name, option.elsewhere)
