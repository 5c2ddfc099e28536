"""The core of tds trains a pipeline of plain modules of torch in a process that cannot import DeepSpeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import importlib.abc, json, os, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "deepspeed":
            raise AssertionError("deepspeed is imported")

sys.meta_path.insert(0, Refuse())
import torch
import torch.distributed as dist
from torch import nn
from tds.engine.engine import ScheduleEngine
from tds.engine.monitor import Names
from tds.engine.pipeline_json import PipelineSettings

def layers():
    torch.manual_seed(1)
    made = [nn.Linear(6, 6, dtype=torch.float64), nn.Tanh(), nn.Linear(6, 6, dtype=torch.float64), nn.Tanh()]
    return made

def batches(step):
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)) for _ in range(4)]

def loss_fn(output, labels):
    return (output - labels).square().mean()

class StageModule(nn.Sequential):
    loss_fn = staticmethod(loss_fn)
    get_additional_losses = staticmethod(lambda: None)
    get_tied_weights_and_groups = staticmethod(list)

class Grid:
    def __init__(self, rank, size):
        self._rank = rank
        self.pipe_parallel_size, self.data_parallel_size, self.model_parallel_size = size, 1, 1
        self.pipe_groups = [list(range(size))]
        self.own = [dist.new_group([each]) for each in range(size)][rank]
    def get_stage_id(self): return self._rank
    def get_global_rank(self): return self._rank
    def get_data_parallel_rank(self): return 0
    def get_slice_parallel_rank(self): return 0
    def stage_to_global(self, stage_id): return stage_id
    def get_pipe_parallel_group(self): return dist.group.WORLD
    def get_data_parallel_group(self): return self.own
    def get_slice_parallel_group(self): return self.own
    def get_model_parallel_group(self): return dist.group.WORLD

def run(rank, size, folder, schedule):
    dist.init_process_group("gloo", init_method=f"file://{folder}/{schedule}", rank=rank, world_size=size)
    every = layers()
    module = StageModule(*(every[2 * rank : 2 * rank + 2] if size == 2 else every))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    settings = PipelineSettings(schedule=schedule, gradient_clipping=0.1)
    engine = ScheduleEngine(
        module, Grid(rank, size), torch.device("cpu"), optimizer, micro_batches=4, settings=settings,
        names=Names([f"rank {each}" for each in range(size)]),
    )
    found = []
    for step in range(3):
        loss = engine.train_batch(iter(batches(step)))
        found.append([float(loss), float(engine.grad_norm)])
    found.append(float(engine.eval_batch(iter(batches(9)))))
    weights = [p.detach().flatten().tolist() for p in module.parameters()]
    (open(f"{folder}/{schedule}-{size}-{rank}.json", "w")).write(json.dumps([found, weights]))

folder = sys.argv[1]
for schedule, size in (("1f1b", 2), ("zb-h1", 2), ("gpipe", 1)):
    children = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            run(rank, size, folder, schedule)
            dist.destroy_process_group()
            sys.stdout.flush()
            os._exit(0)
        children.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
"""


def test_pipeline_of_plain_modules_equals_one_process(tmp_path: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert completed.returncode == 0, completed.stderr
    results, weights = json.loads((tmp_path / "gpipe-1-0.json").read_text())
    for schedule in ("1f1b", "zb-h1"):
        ranks = [json.loads((tmp_path / f"{schedule}-2-{rank}.json").read_text()) for rank in range(2)]
        assert ranks[0][0] == ranks[1][0]
        for (loss, norm), (expected_loss, expected_norm) in zip(ranks[0][0][:-1], results[:-1], strict=True):
            assert abs(loss - expected_loss) < 1e-14 and abs(norm - expected_norm) < 1e-14
        assert abs(ranks[0][0][-1] - results[-1]) < 1e-14
        pipeline_weights = [value for rank in ranks for values in rank[1] for value in values]
        assert max(abs(a - b) for a, b in zip(pipeline_weights, [v for w in weights for v in w], strict=True)) < 1e-14
