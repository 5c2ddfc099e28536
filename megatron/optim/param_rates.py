"""Which parameters have a learning rate, a weight decay or an epsilon of their own: the flags, by names.

| flag | parameters |
|---|---|
| --lr-embedding, --decoupled-lr | ``embedding.word.weight``, also where it is the head |
| --lr-head, --decoupled-lr | ``head.weight`` |
| --lr-by-name, --weight-decay-by-name | whose names in checkpoints fit a pattern, as ``fnmatch`` has it |
| --mup-base-hidden-size | matrices of layers that AdamW moves: rate and epsilon by 1/m, m the width multiplier |

A table by name counts more than the other flags, and its last pattern that fits more than those ahead of it. What a
flag names is the rate itself: muP divides the rate of --lr alone.

All rates have one course: ``LRScheduler`` with another peak, and a floor in the ratio of the peaks.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from megatron.config import Config, OptimizerConfig
from megatron.config.optimizer import read_table
from megatron.errors import ConfigError
from megatron.mpu.matrices import matrices_of

WORD_TABLE, HEAD = "embedding.word.weight", "head.weight"


@dataclass(frozen=True)
class ParamRate:
    """What a parameter has of its own.

    Args:
        label: of the group in logs; "" where its rate is that of --lr.
        lr, min_lr: peak and floor.
        weight_decay: None: as ``decay_groups`` has it.
        epsilon: of AdamW; None: --adam-eps.
    """

    label: str = ""
    lr: float = 0.0
    min_lr: float = 0.0
    weight_decay: float | None = None
    epsilon: float | None = None

    def settings(self) -> dict[str, float]:
        """Return the keys of a parameter group; ``set_learning_rates`` reads ``peak_lr`` and ``floor_lr``."""
        found = {"lr": self.lr, "peak_lr": self.lr, "floor_lr": self.min_lr} if self.label else {}
        found |= {} if self.weight_decay is None else {"weight_decay": self.weight_decay}
        return found | ({} if self.epsilon is None else {"eps": self.epsilon})


@dataclass(frozen=True)
class RateTable:
    """The rates that flags give; the same on every rank.

    Args:
        named: pattern -> rate, each counting more than those ahead of it.
        decays: pattern -> weight decay.
        hidden: of the matrices of layers, where they have one.
    """

    named: Mapping[str, ParamRate]
    decays: Mapping[str, float]
    hidden: ParamRate | None = None

    @classmethod
    def of(cls, config: Config) -> RateTable:
        """Return the table of ``config``."""
        settings, is_tied = config.optimizer, not config.model.untie_embeddings
        named = {pattern: rate for pattern, rate in _of_tables(settings) if not (is_tied and pattern == HEAD)}
        if settings.lr_by_name:
            for pattern, lr in read_table(settings.lr_by_name).items():
                named.pop(pattern, None)  # so that it comes last
                named[pattern] = ParamRate(pattern, lr, _floor(settings, lr))
        decays = read_table(settings.weight_decay_by_name) if settings.weight_decay_by_name else {}
        return cls(named, decays, _of_mup(config))

    @property
    def rates(self) -> list[ParamRate]:
        """Those that are logged beside --lr, by their labels."""
        return [*([] if self.hidden is None else [self.hidden]), *self.named.values()]

    def rate_of(self, name: str, parameter: torch.Tensor) -> ParamRate | None:
        """Return what the parameter of that name has of its own."""
        fitting = [rate for pattern, rate in self.named.items() if fnmatchcase(name, pattern)]
        is_hidden = parameter.dim() >= 2 and matrices_of(parameter) is not None
        found = fitting[-1] if fitting else self.hidden if is_hidden else None
        decays = [decay for pattern, decay in self.decays.items() if fnmatchcase(name, pattern)]
        if decays:
            return replace(found or ParamRate(), weight_decay=decays[-1])
        return found

    def check_names(self, names: Iterable[str]) -> None:
        """Check that each pattern fits one of ``names``, those of the whole model.

        Raises:
            ConfigError: with the names that are near.
        """
        every = sorted(set(names))
        for pattern in dict.fromkeys([*self.named, *self.decays]):
            if not any(fnmatchcase(name, pattern) for name in every):
                near = difflib.get_close_matches(pattern, every, n=3, cutoff=0.4) or every[:3]
                raise ConfigError(
                    f"a rate by name must fit a parameter, got {_flag(pattern)} and no such name in this model. Near "
                    f"are {', '.join(near)}; tools/inspect_checkpoint.py lists all"
                )


def _of_mup(config: Config) -> ParamRate | None:
    """Return what muP gives the matrices of layers; Muon's updates fit any width by their own scale."""
    settings, m = config.optimizer, config.model.width_multiplier
    if m == 1.0 or settings.optimizer != "adamw":
        return None
    return ParamRate("hidden", settings.lr / m, settings.min_lr / m, epsilon=settings.adam_eps / m)


def _flag(pattern: str) -> str:
    """Return how the user may have given ``pattern``."""
    own = {WORD_TABLE: "--lr-embedding", HEAD: "--lr-head"}
    return f"the pattern {pattern!r}" + (f" ({own[pattern]})" if pattern in own else "")


def _of_tables(settings: OptimizerConfig) -> Iterator[tuple[str, ParamRate]]:
    """Yield name and rate of word embedding and head, as far as flags give them."""
    for label, name in (("embedding", WORD_TABLE), ("head", HEAD)):
        own, floor = getattr(settings, f"lr_{label}"), settings.decoupled_min_lr
        if own is not None:
            yield name, ParamRate(label, own, _floor(settings, own) if floor is None else floor)
        elif settings.decoupled_lr is not None:
            yield name, ParamRate(label, settings.decoupled_lr, settings.min_lr if floor is None else floor)


def _floor(settings: OptimizerConfig, lr: float) -> float:
    return settings.min_lr * (lr / settings.lr)
