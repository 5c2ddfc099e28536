"""``argparse`` parsers that report an error in one line, without the usage."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Parser that exits with code 2 and a one-line message."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class RaisingParser(argparse.ArgumentParser):
    """Parser that raises ValueError with the message."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)
