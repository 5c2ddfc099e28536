"""All run settings in one frozen object."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron.config import decoder
from megatron.config.batch import BatchConfig
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.debug import DebugConfig
from megatron.config.family import FamilyConfig
from megatron.config.logging import LoggingConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron.config.option import options_of
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.run_length import RunLength
from megatron.config.secrets import mask_secrets
from megatron.config.stability import StabilityConfig
from megatron.errors import ConfigError
from tds.renamed import warn_renamed

SECTIONS: Mapping[str, type] = MappingProxyType(
    {
        "model": ModelConfig,
        "parallel": ParallelConfig,
        "batch": BatchConfig,
        "optimizer": OptimizerConfig,
        "precision": PrecisionConfig,
        "data": DataConfig,
        "checkpoint": CheckpointConfig,
        "stability": StabilityConfig,
        "debug": DebugConfig,
        "logging": LoggingConfig,
        "run": RunConfig,
    }
)
"""Name in ``Config`` -> dataclass of the sections that every run has, in the order of --help and --help-all.

The section of the family follows "model", under the family's name; the two sections describe the model.
"""

RENAMED_SECTIONS: Mapping[str, str] = MappingProxyType({"seeing": "logging"})
"""Former section name -> current name. Files of --config and config.json of older runs use the former names."""

RENAMED_ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {**RENAMED_SECTIONS, "own": "family_config", "given": "explicit_fields"}
)
"""Former attribute of ``Config`` -> current name. Scripts may use the former names until the next release."""

FIRST_FAMILY = "gpt2"
"""Family of checkpoints that do not name one, written before other families existed."""

IDENTITY = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "kv_hidden_size",
    "ff_hidden_size",
    "hidden_bias",
    "max_position_embeddings",
    "vocab_size",
    "untie_embeddings",
    "activation",
)
"""Fields of the model that two runs must share so that one can load the other's weights, in addition to the fields of a
decoder (``decoder.IDENTITY``). A family may add or remove fields.
"""

FIELDS_WITHOUT_FLAG = ("excluded", "requested_train_iters")
"""Fields that have no flag and that scripts do not read."""

PER_RANK_FIELDS = ("local_rank",)
SECRET_FIELDS = ("mlflow_tracking_uri",)
"""Fields whose values may contain credentials; ``to_dict`` masks them."""
"""Fields that differ between the ranks of one job and are excluded from dictionaries that ranks compare."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All configuration sections and the parser's notes; ``config_from_values`` builds a Config for a family.

    ``family_config`` is the family's section, a ``FamilyConfig``. Its type is Any so that each family's fields can be
    accessed.
    """

    family: str = FIRST_FAMILY
    model: ModelConfig = field(default_factory=ModelConfig)
    family_config: Any = field(default_factory=FamilyConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    run: RunConfig = field(default_factory=RunConfig)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)  # DeepSpeed's JSON as read
    extra: Mapping[str, Any] = field(default_factory=dict)  # values of the flags that extra_args_provider added
    explicit_fields: tuple[str, ...] = ()  # fields set by a flag
    repeated: tuple[str, ...] = ()  # flags given more than once; the last value is used
    notes: tuple[str, ...] = ()  # notes to log once at the start
    ignored: Mapping[str, str] = field(default_factory=dict)  # ignored flag or key -> reason why it has no effect
    dropped: Mapping[str, str] = field(default_factory=dict)  # unknown flag dropped on request -> the warning
    shadowed: Mapping[str, str] = field(default_factory=dict)  # flag without effect because of another -> the reason

    def __post_init__(self) -> None:
        family_config = self.family_config.resolved(self.model, self.data)
        object.__setattr__(self, "family_config", family_config)
        if family_config.has_max_positions(self.model) and not self.model.max_position_embeddings:
            model = replace(self.model, max_position_embeddings=max(self.sequence_lengths))
            object.__setattr__(self, "model", model)
        if not self.optimizer.lr_decay_iters:
            optimizer = replace(self.optimizer, lr_decay_iters=max(self.batch.train_iters, 1))
            object.__setattr__(self, "optimizer", optimizer)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Resolve the family's section under the family's name, and sections under their former names."""
            if name == self.__dict__.get("family"):
                return self.family_config
            if name in RENAMED_ATTRIBUTES:
                warn_renamed(f"Config.{name}", RENAMED_ATTRIBUTES[name])
                return getattr(self, RENAMED_ATTRIBUTES[name])
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def total_layers(self) -> int:
        """Number of transformer layers, on both sides for an encoder-decoder."""
        return int(self.family_config.total_layers(self.model))

    @property
    def expert_sizes(self) -> tuple[int, int]:
        """Sizes of expert parallelism and of experts' tensor parallelism (0: all tensor ranks), as in ``Topology``."""
        parallel = self.parallel
        if not self.model.num_experts:
            return 1, 0
        return parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Tokens per sample that the model reads: one length, or the encoder and decoder lengths."""
        lengths: tuple[int, ...] = self.family_config.sequence_lengths(self.batch)
        return lengths

    @property
    def tokens_per_sample(self) -> int:
        """Total tokens per sample that the model reads, the basis of tokens/s."""
        return sum(self.sequence_lengths)

    def run_length(self, data_parallel_size: int) -> RunLength:
        """Compute the run limits; --train-tokens counts the encoder's tokens, as in Megatron-DeepSpeed."""
        return self.batch.run_length(data_parallel_size, self.sequence_lengths[0])

    @property
    def loss_tokens_per_sample(self) -> int:
        """Maximum tokens per sample that contribute to the loss: the length at the output head."""
        return self.sequence_lengths[-1]

    def sections(self) -> dict[str, Any]:
        """Return name -> section. The family's section is included under its name if it has fields."""
        family_section = {self.family: self.family_config} if dataclasses.fields(self.family_config) else {}
        return {
            "model": self.model,
            **family_section,
            **{name: getattr(self, name) for name in SECTIONS if name != "model"},
        }

    def identity(self) -> dict[str, Any]:
        """Collect the settings that two models must share so that one can load the other's weights."""
        family_config, model = self.family_config, self.model
        names = [*IDENTITY, *(decoder.IDENTITY if family_config.KIND == "decoder" else ()), *family_config.IDENTITY]
        if family_config.KIND == "decoder" and not model.has_learned_positions:
            names.remove("max_position_embeddings")  # there is no position table
        family_entry = {"family": self.family} if self.family != FIRST_FAMILY else {}
        values = {name: getattr(family_config if hasattr(family_config, name) else model, name) for name in names}
        values |= {name: 0 for name in decoder.BASE_WIDTHS if values.get(name) == model.hidden_size}
        return {
            **family_entry,
            **{name: value for name, value in values.items() if name not in family_config.NO_IDENTITY},
        }

    @property
    def refitted(self) -> tuple[str, ...]:
        """Names in ``identity`` that may differ: the weights still load, but the outputs change."""
        return (*(decoder.REFITTED if self.family_config.KIND == "decoder" else ()), *self.family_config.REFITTED)

    def to_dict(self) -> dict[str, Any]:
        """Convert all settings to plain data for JSON, the same on every rank; secrets in URIs are masked."""
        settings: dict[str, Any] = {"family": self.family}
        for name, values in self.sections().items():
            section = dataclasses.asdict(values)
            settings[name] = {
                key: mask_secrets(value) if key in SECRET_FIELDS and value else value
                for key, value in section.items()
                if key not in PER_RANK_FIELDS
            }
        settings["deepspeed"] = dict(self.deepspeed)
        settings["extra"] = {key: _plain(value) for key, value in self.extra.items()}
        return settings

    def namespace(self) -> Namespace:
        """Build the flat names that Megatron and CPM scripts expect from ``get_args()``."""
        flat: dict[str, Any] = {}
        for section in self.sections().values():
            flat.update(dataclasses.asdict(section))
        flat["seq_length"] = self.sequence_lengths[0]  # for T5 the encoder's length, as in Megatron
        for section in self.sections().values():
            for option in options_of(section.__class__):
                flat.update({_attribute(alias): flat[option.name] for alias in option.aliases})
        flat.update(
            pipe_parallel_size=self.parallel.pipe_parallel_size if self.parallel.has_pipeline else 0,
            pipeline_model_parallel_size=self.parallel.num_stages,
            openai_gelu=self.model.activation == "gelu-tanh",
            deepspeed=True,
            **{dtype: self.precision.dtype == dtype for dtype in ("fp16", "bf16", "fp32", "fp64")},
        )
        for name in FIELDS_WITHOUT_FLAG:
            del flat[name]
        flat.update(self.extra)
        return Namespace(**flat)

    def fuses_accumulation(self, device_type: str) -> bool:
        """Return ``--gradient-accumulation-fusion``, or the default for this device type if the flag is not set."""
        if self.parallel.gradient_accumulation_fusion is not None:
            return self.parallel.gradient_accumulation_fusion
        return device_type == "cuda" and self.optimizer.zero_stage < 2 and not self.parallel.compile

    def with_vocab(self, vocab_size: int) -> Config:
        """Return this Config with the vocabulary size of the tokenizer or data; ``--vocab-size`` may be larger.

        Raises:
            ConfigError: ``--vocab-size`` is smaller than ``vocab_size``, there are no tokens, or Adafactor would
                average over padding rows.
        """
        wanted_size = self.model.vocab_size
        if vocab_size < 1:
            raise ConfigError(
                f"the vocabulary must contain at least 1 token, got {vocab_size}. Check the tokenizer's files"
            )
        if (
            wanted_size is not None
            and wanted_size < vocab_size
            and "vocab_size" not in self.explicit_fields
            and self.checkpoint.load
        ):
            raise ConfigError(
                f"the tokenizer must not have more tokens than the model of --load {self.checkpoint.load}, got "
                f"{vocab_size} and {wanted_size}. Use the tokenizer of that model, or add --finetune --resize-vocab"
            )
        if wanted_size is not None and wanted_size < vocab_size:
            raise ConfigError(
                f"--vocab-size must be at least the tokenizer's vocabulary, got --vocab-size {wanted_size} and "
                f"{vocab_size} tokens. Remove --vocab-size, or raise it to {vocab_size}"
            )
        config = replace(self, model=replace(self.model, vocab_size=wanted_size or vocab_size))
        config._check_unpadded_rows()
        return config

    def _check_unpadded_rows(self) -> None:
        rows = self.model.padded_vocab_size(self.parallel.model_parallel_size)
        if self.optimizer.optimizer == "adafactor" and rows != self.model.vocab_size:
            raise ConfigError(
                "--optimizer adafactor averages over all rows of a weight, so the vocabulary must not be padded, got "
                f"a vocabulary of {self.model.vocab_size} that --make-vocab-size-divisible-by "
                f"{self.model.make_vocab_size_divisible_by} pads to {rows} rows. Remove that flag, or set "
                f"--vocab-size {rows}"
            )


def _attribute(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, list, type(None))) else str(value)
