"""A run's description in its folder: config.json, command.txt, versions.json and starts.jsonl."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron import files
from megatron.config import Config
from megatron.config.secrets import mask_secrets
from megatron.training.world import World

VERSIONS = "versions.json"


def write_run_record(folder: Path, config: Config, world: World, step: int) -> None:
    """Write config.json, command.txt, versions.json and starts.jsonl. Called on rank 0, which holds the folder's lock.

    Args:
        step: checkpoint step that this start resumes from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder)
    files.replace_bytes(folder / "config.json", _json(config.to_dict()))
    with open(folder / "command.txt", "a", encoding="utf-8") as file:
        defaults = os.environ.get("MEGATRON_DEFAULTS", "")
        defaults_text = f"MEGATRON_DEFAULTS={shlex.quote(defaults)} " if defaults else ""
        command = mask_secrets(f"{defaults_text}{shlex.join([sys.executable, *sys.argv])}")
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {command}\n")
    files.replace_bytes(folder / VERSIONS, _json(versions(world)))
    with open(folder / "starts.jsonl", "a", encoding="utf-8") as file:
        start_entry = {"step": step, "time": time.time(), "ranks": world.grid.topology.world_size}
        file.write(json.dumps(start_entry) + "\n")


def _remove_stale(folder: Path) -> None:
    """Delete temporary files from killed starts."""
    for path in folder.glob(".*"):
        if path.is_file() and (".tmp-" in path.name or path.name.startswith(".probe-")):
            files.remove_file(path)


def versions(world: World) -> dict[str, Any]:
    """Return package versions that affect results, the code's commit, and the machine."""
    return {
        **package_versions(),
        "commit": git_commit(),
        "host": platform.node(),
        "device": world.device_type,
        "world_size": world.grid.topology.world_size,
    }


def package_versions() -> dict[str, str]:
    """Return the versions of Python and packages that affect results."""
    packages = {name: metadata.version(name) for name in ("torch", "deepspeed", "numpy") if _is_installed(name)}
    return {**packages, "python": platform.python_version()}


def git_commit() -> str:
    """Return the code's git commit, with "+changes" if there are uncommitted changes, or "unknown" without git."""
    root = Path(__file__).resolve().parents[2]
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=5, check=True)
    return result.stdout.strip()


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
        return True
    except metadata.PackageNotFoundError:
        return False


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str).encode() + b"\n"
