"""Object stores for tests: one in memory that fails on demand, and moto's server in place of S3."""

from __future__ import annotations

import importlib.util
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron import object_store

needs_moto = pytest.mark.skipif(
    not (importlib.util.find_spec("moto") and importlib.util.find_spec("s3fs")),
    reason="needs s3fs and moto: pip install -e '.[stores]'",
)


def make_empty_store(monkeypatch: pytest.MonkeyPatch, block_bytes: int = 700) -> MemoryFileSystem:
    """Return an empty store in memory. It is read in blocks of ``block_bytes``, and retries do not wait."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(object_store, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(object_store, "PAUSES_S", (0.0, 0.0))
    return fsspec.filesystem("memory")


def intercept(monkeypatch: pytest.MonkeyPatch, operation: str, before_call: Callable[..., None]) -> None:
    """Call ``before_call(path, ...)`` before each ``operation`` of the store; ``before_call`` may raise an error."""
    original = getattr(MemoryFileSystem, operation)

    def wrapper(self: MemoryFileSystem, *args: Any, **kwargs: Any) -> Any:
        before_call(*args, **kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, operation, wrapper)


def cache_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the store cache listings and look-ups until its cache is invalidated, as s3fs and gcsfs do."""
    cache: dict[Any, Any] = {}

    def with_cache(operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: MemoryFileSystem, path: str, *args: Any, **kwargs: Any) -> Any:
            key = operation, path, args, tuple(sorted(kwargs.items()))
            if key not in cache:
                try:
                    cache[key] = call(self, path, *args, **kwargs)
                except FileNotFoundError as error:
                    cache[key] = error
            if isinstance(cache[key], FileNotFoundError):
                raise cache[key]
            return cache[key]

        return wrapper

    for operation in ("find", "info"):
        monkeypatch.setattr(MemoryFileSystem, operation, with_cache(operation, getattr(MemoryFileSystem, operation)))
    monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda self, path=None: cache.clear())


@contextmanager
def s3(monkeypatch: pytest.MonkeyPatch, bucket: str = "bucket") -> Iterator[Any]:
    """Start moto's server with an empty bucket; yield its file system."""
    from moto.server import ThreadedMotoServer

    for name, value in (
        ("AWS_ACCESS_KEY_ID", "k"),
        ("AWS_SECRET_ACCESS_KEY", "s"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        # Servers in one process share their contents, so remove what earlier servers stored.
        urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"").close()
        filesystem = fsspec.filesystem("s3")
        type(filesystem).clear_instance_cache()  # cached instances have the address of an earlier server
        filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
        filesystem.mkdir(bucket)
        yield filesystem
    finally:
        server.stop()
