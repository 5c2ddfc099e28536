"""Parsers of argparse whose errors are a line, without the usage in front of it."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Ends with code 2 and one line, without the usage in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class RaisingParser(argparse.ArgumentParser):
    """Raises ValueError with that line, for a caller who has more to say."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)
