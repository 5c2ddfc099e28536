"""Output of the commands of GPU cases: a file for each command, and one archive with the files of all failed cases.

    LOGS/train/kill--9-and-resume/01.log      # the command, and its complete output
    LOGS/train/kill--9-and-resume/02.log
    LOGS/train/kill--9-and-resume/traceback.log

The archive ``<results>-logs.tgz`` is rewritten after each failure, so that it also exists if the program is killed. It
contains the files of every failed case in the results, including cases of earlier starts with the same LOGS.
"""

from __future__ import annotations

import os
import tarfile
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.part import Results

ARCHIVED = ("failed", "not run")
"""Verdicts of cases whose logs are archived; a case that was killed at the end of its part counts as not run."""
HEAD_BYTES, TAIL_BYTES = 2**19, 3 * 2**19
"""Bytes of the beginning and of the end of a longer file that are archived."""
MAX_TOTAL_BYTES = 96 * 2**20
"""Bytes of all archived files before compression. The oldest files are left out of a larger archive."""


def folder_name(case_name: str) -> str:
    """Return the name of a case as the name of a folder."""
    return "".join(c if c.isalnum() else "-" for c in case_name)[:100]


def start_case(folder: Path, part_name: str, case_name: str) -> Path:
    """Return the empty folder of a case; logs of an earlier start are removed."""
    case_folder = folder / part_name / folder_name(case_name)
    case_folder.mkdir(parents=True, exist_ok=True)
    for path in case_folder.glob("*.log"):
        path.unlink()
    return case_folder


def open_new(folder: Path) -> IO[str]:
    """Return a new numbered file in ``folder``, open for reading and writing."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10_000):
        try:
            return open(folder / f"{number:02d}.log", "x+", encoding="utf-8", errors="replace")
        except FileExistsError:
            continue
    raise RuntimeError(f"{folder} must contain fewer than 10,000 logs")


def archive_path(results: Results) -> Path:
    """Return the path of the archive that belongs to ``results``."""
    return results.path.with_name(results.path.stem + "-logs.tgz")


def write_archive(folder: Path, results: Results) -> Path | None:
    """Write the archive of the failed cases in ``results``; return its path, or None if there are no logs.

    Args:
        folder: folder of the logs of all cases.
    """
    cases = [
        (part_name, folder_name(case_name))
        for part_name, part in results.content["parts"].items()
        for case_name, verdict in part["cases"].items()
        if verdict["status"] in ARCHIVED
    ]
    paths = [path for part_name, case in cases for path in sorted((folder / part_name / case).glob("*.log"))]
    if not paths:
        return None
    target = archive_path(results)
    temporary = target.with_suffix(".tmp")
    with tarfile.open(temporary, "w:gz") as archive:
        for path in _newest(paths):
            content = shorten(path)
            info = tarfile.TarInfo(path.relative_to(folder).as_posix())
            info.size, info.mtime = len(content), int(path.stat().st_mtime)
            archive.addfile(info, BytesIO(content))
    os.replace(temporary, target)
    return target


def _newest(paths: list[Path]) -> list[Path]:
    """Return the newest of ``paths`` with at most ``MAX_TOTAL_BYTES`` together, in their order."""
    selected, total = set(), 0
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        total += min(path.stat().st_size, HEAD_BYTES + TAIL_BYTES)
        if total <= MAX_TOTAL_BYTES:
            selected.add(path)
    return [path for path in paths if path in selected]


def shorten(path: Path) -> bytes:
    """Return the content of a file; of a long file the beginning and the end."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= HEAD_BYTES + TAIL_BYTES:
            return file.read()
        head = file.read(HEAD_BYTES)
        file.seek(size - TAIL_BYTES)
        return head + f"\n[... {size - HEAD_BYTES - TAIL_BYTES} bytes left out ...]\n".encode() + file.read()
