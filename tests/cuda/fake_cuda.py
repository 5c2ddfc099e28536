"""Build and load the simulated device of fake_cuda.cpp, which torch uses as CUDA.

A process must call ``load()`` before it imports torch, because torch queries devices only once, and ``set_guard()``
afterwards, because a build of torch for CUDA has a guard of its own. Tensors on "cuda" can then only be fake tensors.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
PRELOADED_LIBRARIES = ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so")


class EventType(IntEnum):
    """Type of a row of the log, with the meaning of its two numbers; equal to the enumeration in fake_cuda.cpp."""

    OPERATOR = 0  # index of the operator, stream
    RECORD = 1  # event, stream
    WAIT = 2  # event, stream
    HOST_STREAM = 3  # stream
    HOST_EVENT = 4  # event
    HOST_DEVICE = 5
    QUERY = 6  # event
    MADE = 7  # storage, stream that allocates it
    FREE = 8  # storage
    KEEP = 9  # storage, stream: Tensor.record_stream


def find_compiler() -> str | None:
    """Return the C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """Return the path of the library; compile it unless it exists for this source and this version of torch.

    Raises:
        RuntimeError: no compiler is installed, or compilation fails.
    """
    release = importlib.metadata.version("torch")
    name = hashlib.sha256(SOURCE.read_bytes() + release.encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"fake-cuda-{os.getuid()}-{name}.so"
    if built.exists():
        return built
    compiler_path = find_compiler()
    if compiler_path is None:
        raise RuntimeError("the simulated device needs a C++ compiler (g++ or $CXX), found none")
    torch = _torch_folder()
    partial = built.with_suffix(f".{os.getpid()}")
    result = subprocess.run(
        [
            compiler_path, "-std=c++20", "-O0", "-fPIC", "-shared", f"-I{torch / 'include'}",
            f"-I{torch / 'include/torch/csrc/api/include'}", str(SOURCE), "-o", str(partial), f"-L{torch / 'lib'}",
            "-lc10", "-ltorch_cpu",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if result.returncode:
        raise RuntimeError(f"the simulated device cannot be compiled by {compiler_path}:\n{result.stderr[-4000:]}")
    os.replace(partial, built)
    return built


def load() -> FakeCuda:
    """Load the library, so that torch, which must not be imported yet, finds a GPU."""
    if "torch" in sys.modules:
        raise RuntimeError("the simulated device must be loaded before torch, which is already imported")
    built = build()
    for name in PRELOADED_LIBRARIES:
        ctypes.CDLL(str(_torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return FakeCuda(ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL))


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


class FakeCuda:
    """Functions of the library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.log_event = library.fake_cuda_note
        self.log_event.argtypes, self.log_event.restype = [ctypes.c_int64] * 3, None
        self.storage = library.fake_cuda_storage
        self.storage.argtypes, self.storage.restype = [ctypes.c_void_p], ctypes.c_int64
        self.stream = library.fake_cuda_stream
        self.stream.argtypes, self.stream.restype = [], ctypes.c_int64
        self.pinned = library.fake_cuda_pinned
        self.pinned.argtypes, self.pinned.restype = [ctypes.c_void_p], ctypes.c_int64
        self.set_guard = library.fake_cuda_set_guard
        self.set_guard.argtypes, self.set_guard.restype = [], None
        self._length = library.fake_cuda_length
        self._length.restype = ctypes.c_int64
        self._take = library.fake_cuda_take

    def take_log(self) -> list[tuple[int, int, int]]:
        """Return the rows of the log and clear it."""
        rows = (ctypes.c_int64 * (3 * self._length()))()
        self._take(rows)
        return list(zip(rows[0::3], rows[1::3], rows[2::3], strict=True))
