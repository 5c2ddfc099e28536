"""What torch 2.11 lacks: names of collectives, and how a C++ program is built; by this torch and by an older one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.torch_compat import all_gather_single, load_cpp, reduce_scatter_single
from tests.helpers.harness import run_ranks

NAMES = ("all_gather_single", "reduce_scatter_single")


def run_collectives(rank: int, is_older: bool) -> tuple[list[float], list[float], list[float]]:
    """Return what two ranks gather, and the sum's part that each gets, waited for and not."""
    if is_older:
        warnings.simplefilter("ignore", FutureWarning)
        for name in NAMES:
            if hasattr(dist, name):
                delattr(dist, name)
    local_tensor = torch.tensor([1.0, 2.0]) + 10 * rank
    gathered, reduced, reduced_async = torch.empty(4), torch.empty(2), torch.empty(2)
    all_gather_single(gathered, local_tensor)
    reduce_scatter_single(reduced, gathered * (1 + rank), group=None)
    reduce_scatter_single(reduced_async, gathered, async_op=True).wait()
    return gathered.tolist(), reduced.tolist(), reduced_async.tolist()


@pytest.mark.parametrize("is_older", [False, True], ids=["this torch", "names of an older torch"])
def test_gather_and_reduce_scatter_match_expected_values(is_older: bool) -> None:
    first, second = run_ranks(2, run_collectives, is_older)
    assert first == ([1.0, 2.0, 11.0, 12.0], [3.0, 6.0], [2.0, 4.0])
    assert second == ([1.0, 2.0, 11.0, 12.0], [33.0, 36.0], [22.0, 24.0])


def test_torch_has_new_names_since_2_13() -> None:
    """Else the case of this torch would be the older one there."""
    is_new = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
    assert [hasattr(dist, name) for name in NAMES] == [is_new] * 2


@pytest.mark.parametrize("is_older", [False, True], ids=["this torch", "an older torch"])
def test_load_cpp_disables_vector_isa(is_older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpu_vec_isa
    from torch._inductor.codecache import CppCodeCache

    def load_async_without_option(
        source: str, device: str = "cpu", submit: Any = None, extra_flags: Any = ()
    ) -> None: ...

    def load(source: str, **kwargs: Any) -> Any:
        return source, kwargs, cpu_vec_isa.pick_vec_isa() is cpu_vec_isa.invalid_vec_isa

    monkeypatch.setattr(CppCodeCache, "load", load)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: [cpu_vec_isa.VecAVX2()])
    if is_older:
        monkeypatch.setattr(CppCodeCache, "load_async", load_async_without_option)
    source, kwargs, is_isa_disabled = load_cpp("int x;", ["-O1"])
    assert source == "int x;" and kwargs.pop("extra_flags") == ["-O1"]
    assert kwargs == {"needs_vec_isa": False} or (kwargs == {} and is_isa_disabled)
    assert not (is_older and kwargs)
