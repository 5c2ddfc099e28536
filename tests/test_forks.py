"""What a forked rank of the test suite must not take over from the process that runs the tests."""

from __future__ import annotations

import gc

from tests.helpers.harness import run_ranks


def compile_in_child(rank: int) -> tuple[str, int]:
    """Return what the compiler's pool of threads made, and how many objects no collection goes over."""
    from torch._inductor.async_compile import AsyncCompile

    return AsyncCompile.pool().submit(str, rank).result(timeout=30), gc.get_freeze_count()


def test_a_rank_compiles_though_its_parent_did_and_copies_no_garbage() -> None:
    import torch._inductor.config

    with torch._inductor.config.patch(compile_threads=2):
        from torch._inductor.async_compile import AsyncCompile

        assert AsyncCompile.pool().submit(str, "idle").result() == "idle"
        made, frozen = run_ranks(1, compile_in_child, init=False, deadline_s=60.0)[0]
    AsyncCompile.pool.cache_clear()
    assert made == "0" and frozen > 100_000
