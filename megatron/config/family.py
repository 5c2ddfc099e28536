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
"""The parts of a decoder that is settings of the common one."""


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
    """A family of models: ``FAMILY`` in the config.py of its folder, listed in ``megatron.models.registry``.

    Its parts are dotted names ``module:object``, imported on first use, so that ``--help`` does not import torch. The
    types of the objects are in ``megatron.models.parts``.

    Args:
        name: of its folder, of its section in a configuration, and in checkpoints.
        title: its name in messages.
        config: its section.
        program: the program that trains it, from the root of the repository; of a decoder the one for all decoders.
        script: the run script that starts ``program``; without one a decoder is started by ``run_gpt2.sh --model``.
        length: of a sample, where a plan is not told one; of an encoder-decoder, what the encoder reads.
        vocabulary: the same of its tokens.
        recipe: what its run script says of the model where the user does not: plans begin with the same.
        follows: own field or field of the model that follows from others -> its flag: told with a plan.
        heads: width -> heads of published sizes that the rule of widths does not give.
        variables: variable of its run script -> the field that it sets, beside those that all have.
        benchmark_flags: what the small models that the planner times have beside the recipe; none drops anything.
        layer_lists: kind of unit -> the attribute of the model that holds its layers.
        model: the model without a pipeline, its sizes and initial weights (``ModelParts``).
        pipeline: the class of the model over pipeline stages (``PipelineClass``).
        costs: parameters, FLOPs and memory (``CostsOf``).
        data: samples that are no runs of tokens (``DataParts``); "": they are.
        huggingface: the Hugging Face formats, one for each model type; "": none.

    Raises:
        ValueError: a family that is no decoder lacks a model, a pipeline or costs of its own.
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
        missing = [part for part, default in defaults.items() if getattr(self, part) == default]
        if missing and self.kind != "decoder":
            raise ValueError(f"the family {self.name} is no decoder and must name its own {', '.join(missing)}")

    @property
    def kind(self) -> str:
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
        """The run script with the flag that selects this family, where the script has another."""
        return self.run_script if self.script else f"{self.run_script}{self._selection}"

    @property
    def _selection(self) -> str:
        return f" --model {self.name}" if self.program == DECODER_PROGRAM and self.name != DECODER_FAMILY else ""

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
