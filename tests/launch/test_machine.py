"""Unset variables follow the machine; what the user set is never changed."""

from __future__ import annotations

import itertools

import pytest

from megatron.errors import ConfigError
from megatron.launch import machine
from megatron.launch.__main__ import main
from megatron.launch.machine import count_gpus, first_host, from_slurm, resolve


def resolve_layout(num_gpus: int, **env: str) -> tuple[int, int, int]:
    resolved = resolve(env, num_gpus)
    return int(resolved["GPUS_PER_NODE"]), int(resolved["pp_size"]), int(resolved["mp_size"])


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [(0, (4, 2, 2)), (1, (1, 1, 1)), (2, (2, 2, 1)), (3, (2, 2, 1)), (4, (4, 2, 2)), (7, (4, 2, 2)), (8, (8, 2, 2))],
)
def test_unset_variables_follow_number_of_gpus(num_gpus, expected):
    assert resolve_layout(num_gpus) == expected


@pytest.mark.parametrize(
    ("num_gpus", "env", "expected"),
    [
        (0, {"pp_size": "1", "mp_size": "1"}, (4, 1, 1)),
        (0, {"pp_size": "4", "mp_size": "2"}, (8, 4, 2)),
        (0, {"GPUS_PER_NODE": "1"}, (1, 1, 1)),
        (0, {"GPUS_PER_NODE": "2"}, (2, 2, 1)),
        (0, {"GPUS_PER_NODE": "3"}, (3, 1, 1)),
        (0, {"pp_size": "0"}, (4, 0, 2)),
        (8, {"mp_size": "4"}, (8, 2, 4)),
        (8, {"pp_size": "3", "mp_size": "1"}, (6, 3, 1)),
        (0, {"GPUS_PER_NODE": "2", "cp_size": "2"}, (2, 1, 1)),
        (0, {"cp_size": "2"}, (4, 2, 1)),
        (8, {"cp_size": "2", "mp_size": "2"}, (8, 2, 2)),
        (8, {"cp_size": "8"}, (8, 1, 1)),
        (1, {"NNODES": "2", "MASTER_ADDR": "a", "pp_size": "2"}, (1, 2, 1)),
    ],
)
def test_unset_variables_fit_set_variables(num_gpus, env, expected):
    assert resolve_layout(num_gpus, **env) == expected


def test_user_values_are_used_or_raise():
    for num_gpus, per_node, pipe, tensor in itertools.product(
        (0, 1, 2, 3, 8), ("", "1", "2", "6"), ("", "0", "3"), ("", "2")
    ):
        env = {"GPUS_PER_NODE": per_node, "pp_size": pipe, "mp_size": tensor}
        try:
            resolved = resolve(env, num_gpus)
        except ConfigError:
            continue
        assert all(resolved[name] == value for name, value in env.items() if value)
        assert int(resolved["GPUS_PER_NODE"]) % (max(int(resolved["pp_size"]), 1) * int(resolved["mp_size"])) == 0


@pytest.mark.parametrize(
    ("num_gpus", "env", "message"),
    [
        (1, {"GPUS_PER_NODE": "4"}, "GPUS_PER_NODE=4 and 1 GPU(s)"),
        (2, {"pp_size": "2", "mp_size": "2"}, "4 required"),
        (0, {"GPUS_PER_NODE": "3", "pp_size": "2", "mp_size": "1"}, "3 x 1 = 3 devices, 2 x 1 = 2 required"),
        (2, {"pp_size": "2", "cp_size": "2"}, "cp_size=2 (2 x 1 = 2 devices, 2 x 1 x 2 = 4 required)"),
        (0, {"NNODES": "two"}, "NNODES must be a whole number, at least 1, got NNODES='two'"),
        (0, {"NNODES": "2"}, "needs MASTER_ADDR"),
        (0, {"NNODES": "2", "MASTER_ADDR": ""}, "NNODES=2 needs MASTER_ADDR"),
    ],
)
def test_impossible_layout_error_names_numbers(num_gpus, env, message):
    with pytest.raises(ConfigError) as exc_info:
        resolve(env, num_gpus)
    assert message in str(exc_info.value)


def test_elastic_nodes_need_no_master_addr():
    resolved = resolve({"NNODES": "1:2", "GPUS_PER_NODE": "1", "pp_size": "2"}, 0)
    assert (resolved["NNODES"], resolved["pp_size"], resolved["mp_size"]) == ("1:2", "2", "1")
    with pytest.raises(ConfigError, match="NNODES must be a whole number, at least 1, got NNODES='x'"):
        resolve({"NNODES": "1:x"}, 0)


@pytest.mark.parametrize("value", ["abc", "-1", "1.5"])
def test_invalid_gpu_count_raises(value):
    with pytest.raises(ConfigError, match=f"MEGATRON_NUM_GPUS must be a whole number, .*'{value}'"):
        count_gpus({"MEGATRON_NUM_GPUS": value})


SLURM_ENV = {
    "SLURM_JOB_ID": "123",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[003-010,20],x1",
}


def test_slurm_sets_nodes_and_user_overrides():
    resolved = resolve(SLURM_ENV, 0)
    assert [resolved[name] for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")] == [
        "2",
        "1",
        "gpu003",
        "20123",
    ]
    assert resolve(SLURM_ENV | {"NNODES": "1", "NODE_RANK": "0"}, 0)["NNODES"] == "1"


def test_multiple_slurm_tasks_per_node_raise():
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}
    with pytest.raises(ConfigError, match="once per node.* Start the run script with"):
        from_slurm(SLURM_ENV | step)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("a1", "a1"), ("a1,b2", "a1"), ("gpu[7,9]", "gpu7"), ("r[1-2]n[03-04],z", "r1n03"), ("n[001-4]-ib", "n001-ib")],
)
def test_first_host_parses_nodelist(nodelist, host, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert first_host(nodelist) == host


@pytest.mark.parametrize(("cores", "ranks", "is_warned"), [(2, 4, False), (2, 5, True), (1, 4, False), (8, 16, False)])
def test_too_many_ranks_per_core_warn(monkeypatch, cores, ranks, is_warned):
    monkeypatch.setattr(machine, "num_cores", lambda: cores)
    assert (machine.crowding_warning(ranks) is not None) is is_warned


def test_launcher_warns_once_about_too_many_ranks(monkeypatch, capsys):
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def fail_to_start() -> None:
        raise ConfigError("no rank is started in this test")

    monkeypatch.setattr("megatron.launch.processes.Signals", fail_to_start)
    assert main(["--nproc-per-node", "16", __file__]) == 2
    output = capsys.readouterr().err
    assert output.count("warning: 16 ranks share 2 cores") == 1 and "Start at most 4 ranks on this node" in output
