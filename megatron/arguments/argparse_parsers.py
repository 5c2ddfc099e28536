"""Parsers of argparse whose errors are one line, without the usage."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Exits with code 2 and a one-line message."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class RaisingParser(argparse.ArgumentParser):
    """Raises ValueError with the message."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)
