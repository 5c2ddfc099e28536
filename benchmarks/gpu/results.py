"""What has been seen on a device: a verdict for each case, kept in one JSON file so that a second start goes on.

The file, ``gpu-<device>-<date>.json``:

    {"device": "NVIDIA H200", "kind": "cuda", "date": "2026-11-24", "commit": "...", "versions": {...}, "is_dry": false,
     "parts": {"train": {"seconds": 61.2, "cases": {"gpt2 bf16": {"status": "passed", "text": "...", "figures": {...},
     "seconds": 8.1}}}}}
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED, NOT_RUN = "passed", "failed", "skipped", "not run"
FINAL = (PASSED, FAILED, SKIPPED)
"""What a second start does not repeat."""


@dataclass(frozen=True)
class Verdict:
    """What a case has shown.

    Args:
        status: PASSED, FAILED, SKIPPED (cannot be done on this machine, the text says why) or NOT_RUN (no time left).
        text: one line: what was seen, and against what.
        figures: numbers for tables and pictures, as JSON has them.
    """

    status: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Results:
    """The verdicts of all parts so far, in the file ``path``, which is written anew after each."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {**about, "parts": {}}

    @classmethod
    def begin_or_go_on(cls, folder: Path, about: Mapping[str, Any]) -> Results:
        """Return the newest results in ``folder`` of the same device, commit and size, else new ones."""
        folder.mkdir(parents=True, exist_ok=True)
        same = ("device", "kind", "commit", "is_dry")
        for path in sorted(folder.glob("gpu-*.json"), reverse=True):
            content = json.loads(path.read_text(encoding="utf-8"))
            if all(content.get(key) == about[key] for key in same):
                results = cls(path, about)
                results.content = content
                return results
        device = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
        stem = f"gpu-{device}-{about['date']}"
        number = sum(1 for _ in folder.glob(f"{stem}*.json"))
        return cls(folder / (f"{stem}.json" if not number else f"{stem}-{number + 1}.json"), about)

    def add(self, part: str, case: str, verdict: Verdict) -> None:
        """Keep a verdict, in place of an earlier one of the case."""
        self._part(part)["cases"][case] = asdict(verdict)
        self.save()

    def add_seconds(self, part: str, seconds: float) -> None:
        """Note that a part took ``seconds`` more."""
        self._part(part)["seconds"] = round(self._part(part)["seconds"] + seconds, 1)
        self.save()

    def of(self, part: str) -> dict[str, Verdict]:
        """Return the verdicts of a part by case."""
        return {name: Verdict(**one) for name, one in self._part(part)["cases"].items()}

    def save(self) -> None:
        """Write the file; what was there before stays until the new one is whole."""
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(self.content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(beside, self.path)

    def _part(self, name: str) -> dict[str, Any]:
        return self.content["parts"].setdefault(name, {"seconds": 0.0, "cases": {}})
