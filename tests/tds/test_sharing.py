"""Modules that many layers share, over stages and chunks, train as they do in one process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import tds
from tds.deepspeed.checkpointing import CheckpointError
from tds.deepspeed.module import layer_parameters
from tds.deepspeed.shared_layers import shared_layer_indices, use_shared_modules
from tds.pipe import LayerSpec, PipelineModule, Shared, SharingLayerSpec, TiedLayerSpec
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Dense, SharedVector, SharingLayer, Toy, check_equal, make_engine, run_toys, train_batch

NON_REENTRANT = {"use_reentrant": False}
CHUNK_SCHEDULES = ("interleaved", "zb-h1")
CHUNKED = {"num_layers": 7, "options": {"chunks": 2}, "pipeline": {"schedule": "interleaved"}}


def _compare(toys: list[Toy], ranks: int, num_stages: int, **kwargs: Any) -> None:
    results = run_ranks(ranks, run_toys, toys, num_stages, kwargs)
    for index, toy in enumerate(toys):
        check_equal([rank_results[index] for rank_results in results], toy, ranks // num_stages, 1e-12)


@pytest.mark.parametrize(
    "num_stages", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_gradients_and_norm_equal_one_process(num_stages: int) -> None:
    """The norm too: each shared weight counts once, however many stages hold it."""
    toys = [
        Toy(
            "sharing",
            num_layers=6,
            num_micro_batches=m,
            loss_type=loss,
            pipeline={"schedule": schedule, **NON_REENTRANT},
        )
        for m, loss, schedule in itertools.product((1, 5), ("scalar", "pair"), ("1f1b", "gpipe", "zb-h1"))
    ]
    _compare(toys, num_stages, num_stages)


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_replicas_reduce_shared_weights_once(num_stages: int) -> None:
    """Within one stage beside the last backward, over stages after the sum of the copies; recompute in both ways."""
    toys = [
        Toy("sharing", num_layers=6, num_micro_batches=3, loss_type="pair", options=options, pipeline=pipeline)
        for options, pipeline in (
            ({}, {"schedule": "1f1b"}),
            ({}, {"schedule": "zb-h1"}),
            ({"activation_checkpoint_interval": 2}, NON_REENTRANT),
            ({"activation_checkpoint_interval": 2}, {"use_reentrant": True}),
        )
    ]
    _compare(toys, 2 * num_stages, num_stages)


def test_weights_of_single_stage_are_reduced_during_backward() -> None:
    toys = [
        Toy(
            "sharing",
            num_layers=6,
            num_micro_batches=3,
            pipeline={"schedule": schedule},
            options={"partition_method": bounds},
        )
        for schedule, bounds in itertools.product(("1f1b", "zb-h1"), ([0, 3, 6], [0, 2, 6]))
    ]
    _compare(toys, 4, 2)


@pytest.mark.slow
def test_chunks_equal_one_process() -> None:
    toys = [
        Toy("sharing", num_micro_batches=m, **{**CHUNKED, "pipeline": {"schedule": name}})
        for m in (1, 4)
        for name in CHUNK_SCHEDULES
    ]
    recompute_options = {**CHUNKED, "options": {"chunks": 3, "activation_checkpoint_interval": 2}}
    recompute_options["pipeline"] = {"schedule": "interleaved", **NON_REENTRANT}
    _compare([*toys, Toy("sharing", num_micro_batches=3, **recompute_options)], 4, 2)


@pytest.mark.slow
def test_every_partition_method_equals_one_process() -> None:
    toys = [
        Toy("sharing", num_layers=6, options={"partition_method": method})
        for method in ("parameters", "type:sharinglayer")
    ]
    profile = {"partition_method": "profile", "profile_batch": toys[0].make_batch(0)}
    _compare([*toys, Toy("sharing", num_layers=6, options=profile)], 2, 2)


def _build_shared_module(rank: int, chunks: int) -> Any:
    """Return, for layers whose weights are random on each rank, what this rank holds and the order of its groups."""
    tds.init_distributed("gloo", verbose=False)
    torch.manual_seed(rank)
    created_groups: list[list[int]] = []
    new_group = deepspeed.comm.new_group
    deepspeed.comm.new_group = lambda ranks: (created_groups.append(list(ranks)), new_group(ranks))[1]
    shares = {name: {"inner": Shared(name, nn.Linear, 3, 3)} for name in ("zeta", "mid", "alpha")}
    used = ["zeta", "zeta", "mid", "alpha", "zeta", "alpha"]
    layers = [SharingLayerSpec(Bare, shares=shares[name]) for name in used]
    module = PipelineModule(layers, num_stages=3, partition_method="uniform", chunks=chunks)
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    chunk_names = [
        {n for n, p in module.named_parameters() for q in module.parameters_of(c) if p is q} for c in range(chunks)
    ]
    ranks_by_key = {key: comm["ranks"] for key, comm in module.tied_comms.items()}
    replicated = {name for name, p in module.named_parameters() if p.ds_pipe_replicated}
    return weights, chunk_names, created_groups[-2:], ranks_by_key, replicated


class Bare(nn.Module):
    """A layer without weights of its own."""

    inner: nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def _names(*keys: str) -> set[str]:
    return {f"tied_modules.{key}.{suffix}" for key in keys for suffix in ("weight", "bias")}


def test_shared_weights_start_equal_on_all_holders() -> None:
    """And know which stages hold what, from groups that every process makes in the order of the keys."""
    results = run_ranks(3, _build_shared_module, 1)
    expected_keys = [{"zeta"}, {"mid", "alpha"}, {"zeta", "alpha"}]
    for rank, (weights, chunk_names, created_groups, ranks_by_key, replicated) in enumerate(results):
        assert set(weights) == chunk_names[0] == _names(*expected_keys[rank])
        assert created_groups == [[1, 2], [0, 2]], "alpha, zeta; the one holder of mid has a group of its own already"
        assert list(ranks_by_key) == sorted(expected_keys[rank])
        assert replicated == (_names("alpha", "zeta") if rank == 2 else set())
    for name in results[2][0]:
        assert torch.equal(results[2][0][name], results[1 if "alpha" in name else 0][0][name])


def test_chunks_list_their_shared_parameters() -> None:
    expected_keys = [({"zeta"}, {"alpha"}), ({"zeta"}, {"zeta"}), ({"mid"}, {"alpha"})]
    for (weights, chunk_names, *_), expected in zip(run_ranks(3, _build_shared_module, 2), expected_keys, strict=True):
        assert chunk_names == [_names(*keys) for keys in expected]
        assert set(weights) == set.union(*chunk_names)


def _partition_with_shared_layers(rank: int) -> Any:
    tds.init_distributed("gloo", verbose=False)
    big = Shared("big", nn.Linear, 100, 100)
    layers = [LayerSpec(Dense, 1, 6, torch.float32) for _ in range(6)]
    layers[:2] = [SharingLayerSpec(Bare, shares={"inner": big, "other": big}) for _ in range(2)]
    return PipelineModule(layers, num_stages=2, partition_method="parameters").parts


def test_shared_module_counts_for_every_layer_using_it() -> None:
    assert run_ranks(2, _partition_with_shared_layers) == [[0, 1, 6]] * 2


TOY = Toy("sharing", num_layers=6, dtype=torch.float32)


def _engine(num_stages: int, **options: Any) -> Any:
    engine = make_engine(TOY, num_stages, **options)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.1
    return engine


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def _save(rank: int, folder: str) -> Any:
    engine = _engine(2)
    train_batch(engine, TOY)
    engine.save_checkpoint(folder)
    saved = _weights(engine)
    return saved, train_batch(engine, TOY)[0]


def _load(rank: int, folder: str, num_stages: int, chunks: int, is_same_layout: bool) -> Any:
    engine = _engine(num_stages, chunks=chunks)
    before = _weights(engine)
    engine.load_checkpoint(folder, load_optimizer_states=is_same_layout)
    loaded = _weights(engine)
    assert all(not torch.equal(weight, before[name]) for name, weight in loaded.items())
    return loaded, train_batch(engine, TOY)[0]


def test_shared_modules_are_saved_once_and_load_on_any_stage_count(tmp_path: Path) -> None:
    results = run_ranks(2, _save, str(tmp_path))
    saved = results[0][0] | results[1][0]
    files = sorted(path.name for path in (tmp_path / "global_step1").glob("shared_*"))
    assert files == [f"shared_{key}-model_states.pt" for key in ("alpha", "mixer", "zeta")]
    for num_stages, chunks in ((2, 1), (1, 1), (3, 1), (2, 3)):
        names: set[str] = set()
        is_same_layout = (num_stages, chunks) == (2, 1)
        for loaded, loss in run_ranks(num_stages, _load, str(tmp_path), num_stages, chunks, is_same_layout):
            assert all(torch.equal(saved[name], weight) for name, weight in loaded.items())
            assert torch.allclose(loss, results[0][1], rtol=1e-6)
            names |= set(loaded)
        assert names == set(saved)


def _load_incomplete(rank: int, folder: str) -> str:
    with pytest.raises(CheckpointError) as raised:
        _engine(2).load_checkpoint(folder)
    return str(raised.value)


def test_missing_shared_module_file_is_named_in_error(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path))
    (tmp_path / "global_step1" / "shared_alpha-model_states.pt").unlink()
    assert all("shared_alpha-model_states.pt" in message for message in run_ranks(2, _load_incomplete, str(tmp_path)))


def test_layer_references_shared_modules_without_registering_them() -> None:
    shared = Shared("t", SharedVector, 1, 4, torch.float32)
    spec = SharingLayerSpec(
        SharingLayer, 2, 4, torch.float32, shares={"table": shared, "mixer": Shared("m", nn.Linear, 4, 4)}
    )
    with use_shared_modules(nn.ModuleDict()) as modules:
        layer, other = spec.build(), spec.build()
    assert set(dict(layer.named_modules())) == {"", "inner"} and list(modules) == ["t", "m"]
    assert layer.table is other.table is modules["t"]
    assert len(list(layer_parameters(layer))) == 2 + 1 + 2
    with pytest.raises(AttributeError, match="table"):
        _ = spec.build().table


def _get_stock_module_error(rank: int) -> str:
    tds.init_distributed("gloo", verbose=False)
    module = deepspeed.PipelineModule(TOY.layer_specs(), num_stages=1, loss_fn=TOY.loss_fn)
    with pytest.raises(TypeError) as raised:
        make_engine(TOY, 1, module=module)
    return str(raised.value)


def test_invalid_sharing_is_rejected() -> None:
    with pytest.raises(ValueError, match="must be an identifier such as 'bias', got 'encoder.bias'"):
        Shared("encoder.bias", SharedVector)
    table, other = Shared("t", SharedVector, 1, 4), Shared("t", nn.Linear, 4, 4)
    layers = [SharingLayerSpec(Bare, shares={"inner": shared}) for shared in (table, other)]
    with pytest.raises(ValueError, match="'t' for SharedVector and for Linear of layer 1"):
        shared_layer_indices(layers)
    with pytest.raises(ValueError, match="'t' for TiedLayerSpec and for SharedVector of layer 0"):
        shared_layer_indices([layers[0], TiedLayerSpec("t", nn.Linear, 4, 4)])
    with (
        pytest.raises(ValueError, match="'forward', because it has this attribute"),
        use_shared_modules(nn.ModuleDict()),
    ):
        SharingLayerSpec(Bare, shares={"forward": other}).build()
    assert "need tds.PipelineModule, got deepspeed." in run_ranks(1, _get_stock_module_error)[0]
