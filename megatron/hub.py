"""Detect Hugging Face Hub model names where a local folder is required. No torch."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
LOCAL = ("runs", "models", "data", "checkpoints", "examples", "tests", "tools")
"""First components of paths that are folders of a checkout and not the owner of a model."""


def is_name(path: Path | str) -> bool:
    """Check if ``path`` does not exist and looks like a model on the Hub, such as Qwen/Qwen3-0.6B."""
    text = str(path)
    owner = text.partition("/")[0]
    is_local = owner in LOCAL or owner.startswith("my-") or Path(owner).exists() or Path(text).exists()
    return _NAME.fullmatch(text) is not None and not text.endswith((".json", ".model", ".txt")) and not is_local


def advice(path: Path | str) -> str:
    """Explain how to download the model ``path`` from the Hub; "" if ``path`` is no model name.

    The text starts with a space, so that it can be appended to a message.
    """
    if not is_name(path):
        return ""
    folder = f"models/{Path(path).name}"
    return (
        f" If it is the name of a model on the Hugging Face Hub, download it "
        f"(`hf download {path} --local-dir {folder}`) and use {folder}"
    )


def load_problem(path: Path | str) -> str | None:
    """Format the error message for a --load that names a model instead of a local folder; None for other values."""
    if not is_name(path):
        return None
    return f"--load must name a folder, got {path}, which is not a folder.{advice(path)}"
