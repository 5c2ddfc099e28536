"""Flags that a user's script adds by ``pretrain(extra_args_provider=...)``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron.arguments.argparse_parsers import RaisingParser
from megatron.arguments.flag_values import family_options
from megatron.arguments.model_choice import FLAG
from megatron.arguments.scan import Scan
from megatron.errors import raise_all

ExtraArgs = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


class ExtraFlags:
    """Flags that ``provider`` adds to the flags of ``family``.

    Args:
        accepts_model: ``--model`` is a flag of the program, so ``provider`` must not add it.

    Raises:
        ConfigError: ``provider`` adds a flag that exists.
    """

    def __init__(self, provider: ExtraArgs | None, family: str, *, accepts_model: bool) -> None:
        self.flags: list[str] = []
        self._parser: argparse.ArgumentParser | None = None
        if provider is None:
            return
        self._parser = RaisingParser(add_help=False, allow_abbrev=False)
        provider(self._parser)
        self.flags = [flag for action in self._parser._actions for flag in action.option_strings]
        known_flags = {flag for option in family_options(family) for flag in option.flags}
        known_flags -= set() if accepts_model else {FLAG}
        clashes = sorted(known_flags & set(self.flags))
        raise_all([f"extra_args_provider must not add a flag that exists, got {flag}. Rename it" for flag in clashes])

    def values(self, scanned: Scan) -> dict[str, Any]:
        """Parse ``scanned.extra_words`` into name -> value; a problem is added to ``scanned``."""
        if self._parser is None:
            return {}
        try:
            return vars(self._parser.parse_args(scanned.extra_words))
        except (ValueError, argparse.ArgumentError) as error:
            scanned.problems.append(f"flags of extra_args_provider: {error}")
            return {}
