"""All settings of a run in one frozen object."""

from __future__ import annotations

import dataclasses
import functools
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from megatron.config.batch import BatchConfig
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.option import Option, options_of
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

SECTIONS: Mapping[str, type] = MappingProxyType(
    {
        "model": ModelConfig,
        "parallel": ParallelConfig,
        "batch": BatchConfig,
        "optimizer": OptimizerConfig,
        "precision": PrecisionConfig,
        "data": DataConfig,
        "checkpoint": CheckpointConfig,
        "run": RunConfig,
    }
)
"""Name in ``Config`` -> dataclass; the groups of --help, in this order."""

RANK_BOUND = ("local_rank",)
"""Fields that differ between the ranks of one job; they are in no dictionary that ranks compare."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One of each section, and what was said while reading them."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)  # the JSON as read
    extra: Mapping[str, Any] = field(default_factory=dict)  # what extra_args_provider added
    given: tuple[str, ...] = ()  # fields set by a flag
    repeated: tuple[str, ...] = ()  # flags given more than once; the last value holds
    notes: tuple[str, ...] = ()  # to be logged once at the start

    def __post_init__(self) -> None:
        if not self.model.max_position_embeddings:
            model = replace(self.model, max_position_embeddings=self.batch.seq_length)
            object.__setattr__(self, "model", model)
        if not self.optimizer.lr_decay_iters:
            optimizer = replace(self.optimizer, lr_decay_iters=max(self.batch.train_iters, 1))
            object.__setattr__(self, "optimizer", optimizer)

    @classmethod
    def of_values(cls, values: Mapping[str, Any], **others: Any) -> Config:
        """Return a Config from flat field names to values; what is missing takes its default."""
        sections = {
            name: section(**{o.name: values[o.name] for o in options_of(section) if o.name in values})
            for name, section in SECTIONS.items()
        }
        return cls(**sections, **others)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain data for JSON, the same on every rank."""
        settings: dict[str, Any] = {}
        for name in SECTIONS:
            section = dataclasses.asdict(getattr(self, name))
            settings[name] = {key: value for key, value in section.items() if key not in RANK_BOUND}
        settings["deepspeed"] = dict(self.deepspeed)
        settings["extra"] = {key: _plain(value) for key, value in self.extra.items()}
        return settings

    def namespace(self) -> Namespace:
        """Return the flat names that Megatron's and CPM's scripts expect of ``get_args()``."""
        flat: dict[str, Any] = {}
        for name in SECTIONS:
            flat.update(dataclasses.asdict(getattr(self, name)))
        for _, option in all_options():
            flat.update({_attribute(alias): flat[option.name] for alias in option.aliases})
        flat.update(
            pipe_parallel_size=self.parallel.pipe_parallel_size if self.parallel.has_pipeline else 0,
            pipeline_model_parallel_size=self.parallel.num_stages,
            openai_gelu=self.model.activation == "gelu-tanh",
            deepspeed=True,
            **{dtype: self.precision.dtype == dtype for dtype in ("fp16", "bf16", "fp32", "fp64")},
        )
        del flat["excluded"]
        flat.update(self.extra)
        return Namespace(**flat)

    def with_vocab(self, vocab_size: int) -> Config:
        """Return this Config with the vocabulary of the tokenizer or data; ``--vocab-size`` may be larger.

        Raises:
            ConfigError: ``--vocab-size`` is smaller than ``vocab_size``, or there are no tokens.
        """
        wanted = self.model.vocab_size
        if vocab_size < 1:
            raise ConfigError(
                f"the vocabulary must hold at least 1 token, got {vocab_size}. Check the tokenizer's files"
            )
        if wanted is not None and wanted < vocab_size:
            raise ConfigError(
                f"--vocab-size must be at least the tokenizer's vocabulary, got --vocab-size {wanted} and "
                f"{vocab_size} tokens. Leave --vocab-size out, or raise it to {vocab_size}"
            )
        return replace(self, model=replace(self.model, vocab_size=wanted or vocab_size))


@functools.cache
def all_options() -> tuple[tuple[str, Option], ...]:
    """Return (section, option) for every flag of ours."""
    return tuple((name, item) for name, section in SECTIONS.items() for item in options_of(section))


def _attribute(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, list, type(None))) else str(value)
