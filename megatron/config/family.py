"""What the section of a family tells beside its flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatron.config.data import DataConfig
from megatron.config.model import ModelConfig


class FamilyConfig:
    """The base of ``T5Config``, ``LlamaConfig`` and their like; as it is, GPT-2's, which has no section of its own."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    """Field of any section -> its default in this family."""
    IDENTITY: ClassVar[tuple[str, ...]] = ()
    """Own fields that two runs must share for one's weights to fit the other."""
    REFITTED: ClassVar[tuple[str, ...]] = ()
    """Those of ``IDENTITY`` with which the same weights fit and compute something else: --finetune may change them."""
    NO_IDENTITY: ClassVar[tuple[str, ...]] = ()
    """Fields of the model's section that they need not share in this family."""

    @property
    def has_max_positions(self) -> bool:
        """Whether ``max_position_embeddings`` counts; 0 is then the longest sequence."""
        return True

    @property
    def summary(self) -> str:
        """What is said of the model behind its sizes."""
        return ""

    def resolved(self, model: ModelConfig, data: DataConfig) -> FamilyConfig:
        """Return this section with the numbers that follow from others."""
        return self

    def problems(self) -> Iterator[str]:
        """Yield what cannot be, looking at this section alone."""
        yield from ()
