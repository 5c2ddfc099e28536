"""How often the kernel's OOM killer has struck here: what can be known of it without reading the kernel's log.

| count | file |
|---|---|
| of this memory cgroup, version 2 | ``memory.events``, ``oom_kill`` |
| of this memory cgroup, version 1 | ``memory.oom_control``, ``oom_kill`` |
| of this machine | ``/proc/vmstat``, ``oom_kill`` |
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path("/")


def oom_kills(root: Path = ROOT) -> dict[str, int]:
    """Return the counts that can be read, by the name of what they count over."""
    files = {"this machine": root / "proc/vmstat", **_of_cgroup(root)}
    counts = {name: _count(path) for name, path in files.items()}
    return {name: count for name, count in counts.items() if count is not None}


def told(before: dict[str, int], after: dict[str, int]) -> str:
    """Say what the counts at the start and now mean for a process that ended by SIGKILL."""
    known = {name: (before[name], after[name]) for name in before if name in after}
    grown = [f"{name}: {was} to {now}" for name, (was, now) in known.items() if now > was]
    if grown:
        return (
            f"perhaps the OOM killer, whose count rose since the start ({', '.join(grown)}); give the job more memory, "
            "or lower --batch-size, --num-workers or the ranks on this node"
        )
    if known:
        return f"perhaps the OOM killer, but its count has not risen ({', '.join(known)}): rather a kill from outside"
    return "perhaps the OOM killer, whose counts cannot be read here"


def _of_cgroup(root: Path) -> dict[str, Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if not controllers:
            found["this job's memory cgroup"] = root / "sys/fs/cgroup" / place.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            found["this job's memory cgroup"] = root / "sys/fs/cgroup/memory" / place.lstrip("/") / "memory.oom_control"
            break  # version 1 holds memory: its files are the ones that count
    return found


def _count(path: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)", path.read_text(), re.M)
    except OSError:
        return None
    return int(found.group(1)) if found else None
