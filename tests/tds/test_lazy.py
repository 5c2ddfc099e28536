"""What ``import tds`` leaves out until it is needed: torch and DeepSpeed."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys

import tds.schedule

WITHOUT_TORCH = (
    "tds",
    "tds.partition",
    "tds.deepspeed.alias",
    *(info.name for info in pkgutil.iter_modules(tds.schedule.__path__, "tds.schedule.")),
)
WITHOUT_DEEPSPEED = (
    "tds.device",
    "tds.gradients",
    "tds.loss",
    "tds.p2p.boundary",
    "tds.p2p.communicator",
    "tds.p2p.host_copies",
    "tds.p2p.process_groups",
    "tds.plot",
    "tds.action_times",
    "tds.trace",
    "tds.watchdog.alarm",
    "tds.watchdog.diagnosis",
    "tds.watchdog.watchdog",
)


def _run_python(program: str, **environment: str) -> str:
    """Return what ``program`` prints in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_loads_no_deepspeed_and_first_use_rejects_other_version() -> None:
    """In one process, since importing torch takes most of the time; ``tds`` and its schedules do not import it."""
    output = _run_python(
        f"""
import importlib, sys
from importlib import metadata
version = metadata.version
metadata.version = lambda package: "0.20.0" if package == "deepspeed" else version(package)
for names, absent in (({WITHOUT_TORCH!r}, ("torch", "deepspeed")), ({WITHOUT_DEEPSPEED!r}, ("deepspeed",))):
    for name in names:
        importlib.import_module(name)
        print(*[f"{{name}} brings {{each}}" for each in absent if each in sys.modules], end="")
import tds
for ask in (lambda: tds.zero, lambda: tds.initialize, lambda: tds.PipelineEngine):
    try:
        print("accepted", ask())
    except ImportError as error:
        print(error)
""",
        TDS_VERBOSE="1",
    )
    assert output.startswith("tds requires deepspeed"), "an import brings torch or DeepSpeed"
    assert output.count("tds requires deepspeed >=0.19.6,<0.20, got 0.20.0") == 3, output


def test_import_reads_no_package_versions() -> None:
    """``importlib.metadata`` with its mail parser would take longer than the rest of a tool's ``--help``."""
    output = _run_python("import sys; before = {*sys.modules}; import tds; print({*sys.modules} - before)")
    assert "tds.deepspeed.alias" in output and "importlib.metadata" not in output


def test_lazy_names_resolve_in_any_import_order() -> None:
    """In the order in which a file by the name of a function, and a module of DeepSpeed's, could take their places."""
    output = _run_python(
        """
import tds as deepspeed
from tds import schedule, pipe
from tds.deepspeed.initialize import initialize
assert deepspeed.initialize is initialize and deepspeed.schedule is schedule
assert deepspeed.runtime.pipe.engine.PipelineEngine is deepspeed.PipelineEngine is not None
assert deepspeed.pipe is pipe and pipe.PipelineModule is deepspeed.PipelineModule
import tds.runtime.zero
assert tds.runtime.zero is deepspeed.zero and tds.runtime.__name__ == "tds.runtime"
assert tds.ops.__compatible_ops__["deepspeed_shm_comm"] is False
import logging
print(logging.getLevelName(tds.utils.logger.level))
""",
        TDS_VERBOSE="1",
    )
    assert output.splitlines()[-1] == "INFO"
