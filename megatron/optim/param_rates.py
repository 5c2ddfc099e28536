"""Learning rates, weight decays and epsilons of individual parameters, which flags set by name.

| flag | parameters |
|---|---|
| --lr-embedding, --decoupled-lr | ``embedding.word.weight``, also if it is the head |
| --lr-head, --decoupled-lr | ``head.weight`` |
| --lr-by-name, --weight-decay-by-name | parameters whose name in checkpoints matches an ``fnmatch`` pattern |
| --mup-base-hidden-size | matrices of layers updated by AdamW: rate and epsilon are divided by the width multiplier m |

Rates by name take precedence over the other flags; among several matching patterns the last one applies. muP does not
divide a rate that one of these flags sets.

All rates follow the schedule of ``LRScheduler`` with another peak. Their floor is proportional to the peak, with two
exceptions: the floor of --decoupled-lr is --min-lr, and --decoupled-min-lr sets the floor directly.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from megatron.config import Config, OptimizerConfig
from megatron.config.optimizer import parse_table
from megatron.errors import ConfigError
from megatron.mpu.matrices import matrices_of

WORD_TABLE, HEAD = "embedding.word.weight", "head.weight"


@dataclass(frozen=True)
class ParamRate:
    """Settings of a parameter that differ from the defaults.

    Args:
        label: label of the group in logs; "" if its rate is that of --lr.
        lr, min_lr: peak and floor of the rate.
        weight_decay: None: the value of ``decay_groups``.
        epsilon: epsilon of AdamW; None: --adam-eps.
    """

    label: str = ""
    lr: float = 0.0
    min_lr: float = 0.0
    weight_decay: float | None = None
    epsilon: float | None = None

    def settings(self) -> dict[str, float]:
        """Return the items of a parameter group; ``set_learning_rates`` reads ``peak_lr`` and ``floor_lr``."""
        items = {"lr": self.lr, "peak_lr": self.lr, "floor_lr": self.min_lr} if self.label else {}
        if self.weight_decay is not None:
            items |= {"weight_decay": self.weight_decay, "has_default_decay": False}
        return items | ({} if self.epsilon is None else {"eps": self.epsilon})


@dataclass(frozen=True)
class RateTable:
    """The rates that flags set, the same on every rank.

    Args:
        named: pattern -> rate; later patterns take precedence.
        decays: pattern -> weight decay; later patterns take precedence.
        hidden: rate for layer matrices; None: the default.
    """

    named: Mapping[str, ParamRate]
    decays: Mapping[str, float]
    hidden: ParamRate | None = None

    @classmethod
    def of(cls, config: Config) -> RateTable:
        """Build the table from ``config``."""
        settings, is_tied = config.optimizer, not config.model.untie_embeddings
        named = {pattern: rate for pattern, rate in _table_rates(settings) if not (is_tied and pattern == HEAD)}
        if settings.lr_by_name:
            for pattern, lr in parse_table(settings.lr_by_name).items():
                named.pop(pattern, None)  # dicts keep the position of existing keys; the last pattern must come last
                named[pattern] = ParamRate(pattern, lr, _floor(settings, lr))
        decays = parse_table(settings.weight_decay_by_name) if settings.weight_decay_by_name else {}
        return cls(named, decays, _mup_rate(config))

    @property
    def rates(self) -> list[ParamRate]:
        """Rates to log in addition to --lr; ``label`` is the name in the log."""
        return [*([] if self.hidden is None else [self.hidden]), *self.named.values()]

    def rate_of(self, name: str, parameter: torch.Tensor) -> ParamRate | None:
        """Return the settings for the parameter ``name``; None: the defaults."""
        matching = [rate for pattern, rate in self.named.items() if fnmatchcase(name, pattern)]
        is_hidden = parameter.dim() >= 2 and matrices_of(parameter) is not None
        matched = matching[-1] if matching else self.hidden if is_hidden else None
        decays = [decay for pattern, decay in self.decays.items() if fnmatchcase(name, pattern)]
        if decays:
            return replace(matched or ParamRate(), weight_decay=decays[-1])
        return matched

    def check_names(self, names: Iterable[str]) -> None:
        """Check that each pattern matches one of the full model's parameter ``names``.

        Raises:
            ConfigError: a pattern matches none. The message lists similar names.
        """
        all_names = sorted(set(names))
        for pattern in dict.fromkeys([*self.named, *self.decays]):
            if not any(fnmatchcase(name, pattern) for name in all_names):
                similar = difflib.get_close_matches(pattern, all_names, n=3, cutoff=0.4) or all_names[:3]
                raise ConfigError(
                    f"{_describe_pattern(pattern)} matches no parameter of this model. Similar names: "
                    f"{', '.join(similar)}. tools/inspect_checkpoint.py lists all names"
                )


def _mup_rate(config: Config) -> ParamRate | None:
    """Return muP's settings for layer matrices; None without muP, and for Muon, whose scale fits any width."""
    settings, m = config.optimizer, config.model.width_multiplier
    if m == 1.0 or settings.optimizer != "adamw":
        return None
    return ParamRate("hidden", settings.lr / m, settings.min_lr / m, epsilon=settings.adam_eps / m)


def _describe_pattern(pattern: str) -> str:
    flags = {WORD_TABLE: "--lr-embedding", HEAD: "--lr-head"}
    return f"the pattern {pattern!r}" + (f" ({flags[pattern]})" if pattern in flags else "")


def _table_rates(settings: OptimizerConfig) -> Iterator[tuple[str, ParamRate]]:
    """Yield (name, rate) for the word embedding and the head if flags set them."""
    for label, name in (("embedding", WORD_TABLE), ("head", HEAD)):
        lr, floor = getattr(settings, f"lr_{label}"), settings.decoupled_min_lr
        if lr is not None:
            yield name, ParamRate(label, lr, _floor(settings, lr) if floor is None else floor)
        elif settings.decoupled_lr is not None:
            yield name, ParamRate(label, settings.decoupled_lr, settings.min_lr if floor is None else floor)


def _floor(settings: OptimizerConfig, lr: float) -> float:
    return settings.min_lr * (lr / settings.lr)
