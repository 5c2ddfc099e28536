"""Import of ``emerging_optimizers``, NVIDIA's implementations of Muon, as a reference for slow tests.

Version 0.3 needs Python 3.12 for ``typing.override`` only, which is supplied here for 3.11. Its Triton kernels, which
need a GPU, are replaced by a module that reports that there are none. To install it:

    pip install --no-deps --ignore-requires-python emerging-optimizers absl-py
"""

from __future__ import annotations

import importlib
import sys
import typing
from types import ModuleType
from typing import Any

import pytest
import typing_extensions


def emerging_module(name: str) -> Any:
    """Import ``emerging_optimizers.NAME``; skip the test where the package is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        if not hasattr(typing, "override"):
            patch.setattr(typing, "override", typing_extensions.override, raising=False)
        pytest.importorskip("emerging_optimizers", reason="emerging-optimizers is not installed (extra [emerging])")
        kernels = ModuleType("emerging_optimizers.triton_kernels")
        kernels.HAS_TRITON_340 = False  # type: ignore[attr-defined]
        sys.modules.setdefault(kernels.__name__, kernels)
        return importlib.import_module(f"emerging_optimizers.{name}")
