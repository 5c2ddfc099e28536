"""Several files replaced as one: after a kill at any moment a reader finds all the old ones or all the new ones.

1. Each new file is written under a temporary name in the same folder and flushed.
2. A small journal ``PREFIX.commit`` with the pairs (temporary name, name) is put in place by one rename: the commit.
   A pair (null, name) stands for a file to delete.
3. The renames in the journal are done, then the journal is deleted. Whoever finds a journal does the rest of them.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron import files
from megatron.errors import DataError


def temporary_path(path: Path) -> Path:
    """Return the name under which this process writes what becomes ``path``."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


def replace_together(prefix: str, paths: Sequence[Path], gone: Sequence[Path] = ()) -> None:
    """Put the temporary files of ``paths``, all written and flushed, in place and delete ``gone``, as one change."""
    roll_forward(prefix)
    names = [[temporary_path(path).name, path.name] for path in paths] + [[None, path.name] for path in gone]
    journal = _journal(prefix)
    files.write_bytes(temporary_path(journal), json.dumps(names).encode())
    files.rename(temporary_path(journal), journal)
    roll_forward(prefix)


def is_pending(prefix: str) -> bool:
    """Return whether a committed replacement waits to be finished."""
    return _journal(prefix).exists()


def roll_forward(prefix: str) -> None:
    """Finish a replacement that was committed and then cut off; does nothing where there is none."""
    journal = _journal(prefix)
    try:
        names = json.loads(journal.read_bytes())
    except FileNotFoundError:
        return
    except ValueError as error:
        raise DataError(f"{journal} is damaged ({error}). Delete it and build {prefix} again.") from error
    try:
        for source, target in names:
            with suppress(FileNotFoundError):  # done already, by the one that was cut off or by another process
                if source is None:
                    files.remove_file(journal.with_name(target))
                else:
                    files.rename(journal.with_name(source), journal.with_name(target))
        files.before_operation("unlink", journal)
        journal.unlink(missing_ok=True)
    except OSError as error:
        if not isinstance(error, PermissionError) and error.errno != errno.EROFS:
            raise
        raise DataError(
            f"{journal}: a cut-off replacement of {prefix} must be finished; no permission: {error}"
        ) from error


def remove_leftovers(prefix: str) -> None:
    """Delete temporary files of processes of this machine that are no more."""
    opening = f".{socket.gethostname()}-"
    for suffix in (".bin", ".idx", ".len", ".meta.json", ".commit"):
        target = Path(prefix + suffix)
        for path in target.parent.glob(glob.escape(f".{target.name}{opening}") + "*.tmp"):
            number = path.name.removesuffix(".tmp").rpartition("-")[2]
            if Path("/proc/self").exists() and not Path(f"/proc/{number}").exists():
                path.unlink(missing_ok=True)


def _journal(prefix: str) -> Path:
    return Path(prefix + ".commit")
