"""The examples of how a job is started: each is read by the program that it is for, or by that program's own parser."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deepspeed.launcher import runner
from torch.distributed.run import get_args_parser

from megatron.config import Config, parse
from megatron.launch.machine import VARIABLE_NAMES
from megatron.launch.options import parse as parse_launch
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import TOKENIZER, launch_script, make_flags, write_corpus

ROOT = Path(__file__).resolve().parents[2]
LAUNCH_DIR = ROOT / "examples" / "launch"
TWO_HOSTS = LAUNCH_DIR / "two_hosts.sh"
RECORD_SCRIPT = '#!/usr/bin/env bash\nprintf "%s\\n" "$0" "$@" > "$NOTES"\nenv > "$NOTES.env"\n'
SKIP_EXIT_CODE = 77


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def record_args(script: str, folder: Path, *flags: str, **env: str) -> list[str]:
    """Return what the program that an example starts is given, the environment in ``folder`` / "words.env"."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name in ("torchrun", "deepspeed", "mpirun", "srun"):
        (programs / name).write_text(RECORD_SCRIPT)
        (programs / name).chmod(0o755)
    (programs / "scontrol").write_text("#!/usr/bin/env bash\necho n4\necho n5\n")
    (programs / "scontrol").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", str(LAUNCH_DIR / script), *flags], cwd=ROOT, check=True, timeout=20,
        env={**os.environ, "PATH": path, "NOTES": str(folder / "words"), "PYTHON": "python", **env},
    )  # fmt: skip
    return (folder / "words").read_text().splitlines()[1:]


def parse_training_flags(args: list[str], corpus: Path, world_size: int) -> Config:
    """Return the configuration that ``pretrain_gpt2.py`` makes of what stands behind it."""
    flags = args[args.index("pretrain_gpt2.py") + 1 :]
    replacements = {"data/sample/gpt2_text_document": str(corpus), "data/sample/tokenizer.json": str(TOKENIZER)}
    assert set(replacements) < set(flags), "the names of tools/make_sample_data.py"
    assert all(name in (ROOT / "tools" / "run.sh").read_text() for name in ("gpt2_text_document", "tokenizer.json"))
    return parse([replacements.get(word, word) for word in flags], world_size=world_size)


def test_torchrun_and_script_flags_parse(corpus: Path, tmp_path: Path) -> None:
    args = record_args("torchrun.sh", tmp_path, "--lr", "1e-5", NNODES="2", NODE_RANK="1", MASTER_ADDR="node0")
    options = get_args_parser().parse_args(args)
    assert (options.nnodes, options.node_rank, options.nproc_per_node, options.master_addr) == ("2", 1, "2", "node0")
    assert parse_training_flags(args, corpus, 4).optimizer.lr == 1e-5
    assert get_args_parser().parse_args(record_args("torchrun.sh", tmp_path)).master_addr == "127.0.0.1"


def test_deepspeed_hostfile_and_flags_parse(corpus: Path, tmp_path: Path) -> None:
    hostfile = str(LAUNCH_DIR / "hostfile")
    assert dict(runner.fetch_hostfile(hostfile)) == {"node0": 8, "node1": 8}
    options = runner.parse_args(record_args("deepspeed.sh", tmp_path, HOSTFILE=hostfile))
    assert (options.hostfile, options.user_script) == (hostfile, "pretrain_gpt2.py")
    args = record_args("deepspeed.sh", tmp_path, "--lr", "1e-5")
    assert runner.parse_args(args).num_gpus == 2
    assert parse_training_flags([*args, "--local_rank=1"], corpus, 2).run.local_rank == 1


def test_mpirun_passes_rendezvous_address(corpus: Path, tmp_path: Path) -> None:
    args = record_args("mpirun.sh", tmp_path, NUM_RANKS="16", HOSTS="node0:8,node1:8", MASTER_ADDR="node0")
    assert args[: args.index("python")] == shlex.split(
        "-n 16 --bind-to none --host node0:8,node1:8 -x MASTER_ADDR -x MASTER_PORT=29500"
    )
    assert parse_training_flags(args, corpus, 16).parallel.pipe_parallel_size == 2
    assert record_args("mpirun.sh", tmp_path)[:5] == ["-n", "2", "--bind-to", "none", "python"]


def test_srun_starts_one_task_per_rank(corpus: Path, tmp_path: Path) -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", (LAUNCH_DIR / "srun.sh").read_text(), re.M))
    assert options["ntasks-per-node"] == options["gpus-per-node"] == "8"
    args = record_args("srun.sh", tmp_path, SLURM_JOB_ID="77", SLURM_JOB_NODELIST="n[4-5]", SLURM_CPUS_PER_TASK="4")
    assert args[: args.index("python")] == ["--kill-on-bad-exit=1"]
    env = (tmp_path / "words.env").read_text().splitlines()
    assert {"MASTER_ADDR=n4", "MASTER_PORT=20077", "SRUN_CPUS_PER_TASK=4"} < set(env)
    world_size = int(options["nodes"]) * int(options["ntasks-per-node"])
    assert parse_training_flags(args, corpus, world_size).parallel.data_parallel_size(world_size) == 4


def read_manifests(name: str) -> dict[str, Any]:
    """Return the objects of a file by their kind."""
    return {
        manifest["kind"]: manifest for manifest in yaml.safe_load_all((LAUNCH_DIR / "kubernetes" / name).read_text())
    }


@pytest.mark.parametrize("file", ["job.yaml", "elastic.yaml"])
def test_kubernetes_job_starts_run_script_once_per_pod(file: str, corpus: Path, tmp_path: Path) -> None:
    manifests = read_manifests(file)
    service, job = manifests["Service"], manifests["Job"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    name = manifests["Job"]["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert pod["subdomain"] == service["metadata"]["name"] and pod["restartPolicy"] == "Never"
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert set(env) <= {*VARIABLE_NAMES, "NODE_LIST"}
    pods = [f"{name}-{index}.{pod['subdomain']}" for index in range(job["completions"])]
    if file == "job.yaml":
        assert env["MASTER_ADDR"] == pods[0]
    else:
        assert env["NODE_LIST"].split(",") == pods
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == int(env["NNODES"].rpartition(":")[2])
    assert int(env["GPUS_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(env["MASTER_PORT"]) == container["ports"][0]["containerPort"]
    index = next(entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in container["env"] if "valueFrom" in entry)
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    codes = {rule["action"]: rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert (codes["FailJob"]["values"], codes["Ignore"]["values"]) == ([2, 3, 5], [75])
    assert {codes[action]["containerName"] for action in codes} == {container["name"]}
    bash, script, *args = container["command"]
    assert (bash, script) == ("bash", "run_gpt2.sh") and all(isinstance(word, str) for word in args)
    launcher_start = args.index("--max-restarts")
    nodes = ["--nnodes", env["NNODES"], "--node-list", env.get("NODE_LIST", "")]
    options = parse_launch([*args[launcher_start:], *nodes, str(ROOT / script)], {"DS_ACCELERATOR": "cpu"})
    assert options.is_elastic == (file == "elastic.yaml")
    parse([*args[:launcher_start], *make_flags(corpus, tmp_path)[:-2]], world_size=1)
    volumes = {entry["name"] for entry in pod["volumes"]}
    assert {entry["name"] for entry in container["volumeMounts"]} == volumes


def test_pytorchjob_starts_torchrun_in_each_pod(corpus: Path) -> None:
    spec = read_manifests("pytorchjob.yaml")["PyTorchJob"]["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch" and container["command"][0] == "torchrun"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(spec["nprocPerNode"])
        args = container["command"][1:]
        assert get_args_parser().parse_args(args).training_script == "pretrain_gpt2.py"
        world_size = int(spec["nprocPerNode"]) * sum(replica["replicas"] for replica in replicas.values())
        assert parse_training_flags(args, corpus, world_size).checkpoint.resume


SOCKET_PROGRAM = """\
import os, socket, sys, time
own = int(os.environ["NODE_RANK"])
listener = socket.create_server(("127.0.0.1", 5000))
if own == 0:
    meeting = socket.create_server((os.environ["MASTER_ADDR"], 5001))
    other, address = meeting.accept()
    print("heard", other.recv(9).decode(), "from", address[0])
    sys.exit(3)
for _ in range(200):
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], 5001)).send(b"node 1")
        break
    except OSError:
        time.sleep(0.05)
"""


def run_on_two_hosts(*command: str, timeout: float, **env: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        ["bash", str(TWO_HOSTS), *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "DS_ACCELERATOR": "cpu", **env},
    )  # fmt: skip
    if result.returncode == SKIP_EXIT_CODE:
        pytest.skip(result.stderr.strip())
    return result


def test_two_hosts_have_network_and_separate_localhost() -> None:
    """Both listen at one port of their localhost, which only two hosts can."""
    result = run_on_two_hosts(sys.executable, "-c", SOCKET_PROGRAM, timeout=30)
    assert "heard node 1 from 10.77.0.2" in result.stdout, result.stderr
    assert result.returncode == 3 and "node 0 ended with code 3, node 1 with 0" in result.stdout


def read_losses(folder: Path) -> Iterator[float]:
    return (record["loss"] for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train")


TWO_STAGE_FLAGS = "--pipe-parallel-size 2 --train-iters 3 --eval-iters 0"


def set_open_mpi_environment(rank: int) -> None:
    """Say who this rank is as mpirun would, and as old launchers did, by a flag."""
    for name_in_torch, mpi_name in (("RANK", "RANK"), ("WORLD_SIZE", "SIZE"), ("LOCAL_RANK", "LOCAL_RANK")):
        os.environ[f"OMPI_COMM_WORLD_{mpi_name}"] = os.environ.pop(name_in_torch)
    os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = os.environ.pop("LOCAL_WORLD_SIZE")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    sys.argv.append(f"--local_rank={rank}")


def test_mpirun_ranks_train(corpus: Path, tmp_path: Path) -> None:
    """The small sibling of the slow tests below."""
    log = tmp_path / "log"
    assert launch_script(2, make_flags(corpus, tmp_path / "run", TWO_STAGE_FLAGS), log, set_open_mpi_environment) == [
        0,
        0,
    ], log.read_text()
    assert len(list(read_losses(tmp_path / "run"))) == 3


def train_with_launcher(program: str, corpus: Path, folder: Path) -> list[float]:
    """Return the losses of two ranks that ``program`` starts."""
    port = str(29700 + os.getpid() % 200)
    tools = Path(sys.executable).parent
    commands = {
        "torchrun": [str(tools / "torchrun"), "--nproc-per-node", "2", "--master-port", port],
        "deepspeed": [str(tools / "deepspeed"), "--num_gpus", "2", "--master_port", port],
        "launch": [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", "--master-port", port],
        "two hosts": ["bash", str(TWO_HOSTS), sys.executable, str(folder / "node.py")],
    }
    folder.mkdir()
    node_program = (
        "import os, sys; os.execv(sys.executable, [sys.executable, '-m', 'megatron.launch', '--nnodes', '2', "
        "'--node-rank', os.environ['NODE_RANK'], '--master-addr', os.environ['MASTER_ADDR'], '--nproc-per-node', '1', "
        "'--init-timeout', '200', *sys.argv[1:]])"
    )
    (folder / "node.py").write_text(node_program)
    argv = [*commands[program], "pretrain_gpt2.py", *make_flags(corpus, folder / "run", TWO_STAGE_FLAGS)]
    path = f"{tools}:{os.environ['PATH']}"
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path}
    result = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    if result.returncode == SKIP_EXIT_CODE:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return list(read_losses(folder / "run"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("program", ["torchrun", "deepspeed", "two hosts"])
def test_launcher_losses_equal_megatron_launch(program: str, corpus: Path, tmp_path: Path) -> None:
    """deepspeed passes --local_rank; on two hosts each node runs a launcher of its own, as on two machines."""
    losses = train_with_launcher(program, corpus, tmp_path / "there")
    assert len(losses) == 3 and losses == train_with_launcher("launch", corpus, tmp_path / "here")
