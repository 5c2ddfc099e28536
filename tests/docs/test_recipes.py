"""CONTRIBUTING's recipes: each is followed in a copy of the tree, file by file, and what it adds is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.runs import TOKENIZER, write_corpus
from tests.helpers.toy_family import FILES

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 8
FLAGS_DOC = "docs/flags.md"
GENERATED = {FLAGS_DOC: (), "docs/other_flags.md": ("other",)}
SPEED = "| `tokens_per_s` |"
Edit = tuple[str, str] | str
"""What is replaced by what, or the text of a new file; "" for a page that a program makes."""
RENAMED = {name: text.replace("toy", "kite").replace("Toy", "Kite") for name, text in FILES.items()}
"""The files of a family that no test registers itself, so that the copied tests run next to it."""

RECIPES: dict[str, dict[str, list[Edit]]] = {
    "A flag": {
        "megatron/config/run.py": [
            (
                "    log_layer_norms: bool = option(\n",
                '    log_weight_norm: bool = option(False, "record the norm of all weights")\n'
                "    log_layer_norms: bool = option(\n",
            )
        ],
        FLAGS_DOC: [""],
        "megatron/training/train.py": [
            (
                "    yield SpeedMonitor(counted)\n",
                "    if config.seeing.log_weight_norm:\n        yield WeightNorm()\n    yield SpeedMonitor(counted)\n",
            )
        ],
        "tests/config/test_every_field.py": [
            (
                '    "log_layer_norms": "training/train.py",\n',
                '    "log_layer_norms": "training/train.py",\n    "log_weight_norm": "training/train.py",\n',
            )
        ],
    },
    "A learning-rate schedule": {
        "megatron/optim/lr_scheduler.py": [
            (
                "_DECAYS: dict[",
                "def _polynomial(rate: LRScheduler, u: float) -> float:\n"
                "    return rate.min_lr + (rate.lr - rate.min_lr) * (1.0 - u) ** 2\n\n\n_DECAYS: dict[",
            ),
            ('    "wsd": _wsd,\n', '    "wsd": _wsd,\n    "polynomial": _polynomial,\n'),
            (
                "    | wsd | lr, and",
                "    | polynomial | min_lr + (lr - min_lr) (1 - u)^2 |\n    | wsd | lr, and",
            ),
        ],
        "megatron/config/optimizer.py": [('"wsd", "inverse-', '"wsd", "polynomial", "inverse-')],
        FLAGS_DOC: [""],
        "tests/optim/test_schedules.py": [
            (
                '    "inverse-square-root": LR * ',
                '    "polynomial": MIN + (LR - MIN) * 0.25,\n    "inverse-square-root": LR * ',
            )
        ],
    },
    "A callback": {
        "megatron/training/callbacks/weight_norm.py": [
            '''"""WeightNorm: the norm of all weights of rank 0 (--log-weight-norm)."""

from __future__ import annotations

from typing import Any

import torch

from megatron.training.trainer import Callback


class WeightNorm(Callback):
    """Logs the norm."""

    def on_log(self, metrics: dict[str, Any]) -> None:
        norms = [parameter.detach().float().norm() for parameter in self.trainer.engine.module.parameters()]
        metrics["weight_norm"] = torch.stack(norms).norm().item()
'''
        ],
        "megatron/training/train.py": [
            (
                "from megatron.training.callbacks.wandb import Wandb\n",
                "from megatron.training.callbacks.wandb import Wandb\n"
                "from megatron.training.callbacks.weight_norm import WeightNorm\n",
            )
        ],
        "docs/seeing.md": [(SPEED, "| `weight_norm` | train | | norm of all weights |\n" + SPEED)],
        "docs/zh/seeing.md": [(SPEED, "| `weight_norm` | train | | 所有权重的范数 |\n" + SPEED)],
    },
    "A metric": {
        "megatron/training/callbacks/speed_monitor.py": [
            (
                '            "time": time.time(),\n',
                '            "time": time.time(),\n            "slowest_s": max(self.ranks.own_s),\n',
            )
        ],
        "docs/seeing.md": [(SPEED, "| `slowest_s` | train | s | the most work of a rank |\n" + SPEED)],
        "docs/zh/seeing.md": [(SPEED, "| `slowest_s` | train | 秒 | 各进程中最长的工作 |\n" + SPEED)],
    },
    "A family": {
        "megatron/models/kite/config.py": [
            RENAMED["config.py"].replace('"pretrain_kite', '"examples/kite/pretrain_kite')
        ],
        "megatron/models/kite/huggingface.py": [RENAMED["huggingface.py"]],
        "megatron/models/registry.py": [
            (
                "from megatron.models.t5.config import FAMILY as T5\n",
                "from megatron.models.t5.config import FAMILY as T5\n"
                "from megatron.models.kite.config import FAMILY as KITE\n",
            ),
            ("\n)\nfor _family in _OWN:", "\n    KITE,\n)\nfor _family in _OWN:"),
        ],
        **{
            f"examples/kite/{name.replace('mpt', 'kite')}": [
                (ROOT / "examples/mpt" / name).read_text("utf-8").replace("mpt", "kite").replace("MPT", "Kite")
            ]
            for name in ("pretrain_mpt.py", "run_mpt.sh", "ds_config_mpt.json")
        },
        "tests/config/test_every_field.py": [
            ("READ_IN = {\n", 'READ_IN = {\n    "kite_size": "models/kite/huggingface.py",\n')
        ],
        FLAGS_DOC: [""],
    },
    "A pipeline schedule": {
        "tds/schedule/schedules.py": [
            (
                "ONE_CHUNK: dict[str, Order] = {",
                "def all_forward_first(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:\n"
                "    return gpipe(num_stages, num_micro_batches, stage)\n\n\n"
                'ONE_CHUNK: dict[str, Order] = {"afab": all_forward_first, ',
            ),
            ("# | gpipe | m | (p-1)(F+B+W) |\n", "# | gpipe, afab | m | (p-1)(F+B+W) |\n"),
        ],
        "tds/schedule/simulate.py": [
            ('ONE_CHUNK = ("1f1b", "gpipe", "zb-h1")', 'ONE_CHUNK = ("1f1b", "gpipe", "zb-h1", "afab")'),
            ('"gpipe": most,', '"gpipe": most, "afab": most,'),
        ],
        FLAGS_DOC: [""],
        "docs/pipelines.md": [("| GPipe |", "| all forwards first | the same | m | `afab` |\n| GPipe |")],
    },
}


def listed() -> dict[str, set[str]]:
    """Return the files that each recipe of CONTRIBUTING names."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## Recipes\n")[1].split("\n## ")[0]
    found = {}
    for part in text.split("\n### ")[1:]:
        name, _, body = part.partition("\n")
        items = [line.split(": ")[0] for line in body.splitlines() if line.startswith("* ")]
        found[name] = {path for item in items for path in re.findall(r"`([\w./]+)`", item)}
    return found


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tree in which all recipes have been followed, one after the other."""
    folder = tmp_path_factory.mktemp("recipes") / "tree"
    folder.mkdir()
    for name in ("megatron", "tds", "docs", "examples", "tests", "tools", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc.*", "*.png"))
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.toml"), *ROOT.glob("*.json"), *ROOT.glob("*.sh")]:
        shutil.copy(path, folder / path.name)
    for recipe in RECIPES.values():
        for name, edits in recipe.items():
            for edit in edits:
                follow(folder / name, edit)
    for page, words in GENERATED.items():
        (folder / page).write_text(run(folder, "-m", "megatron.arguments.flags_doc", *words), encoding="utf-8")
    return folder


def follow(path: Path, edit: Edit) -> None:
    if edit == "":
        return
    if isinstance(edit, str):
        path.parent.mkdir(exist_ok=True)
        path.write_text(edit, encoding="utf-8")
        return
    text = path.read_text(encoding="utf-8")
    assert edit[0] in text, f"{path}: {edit[0]}"
    path.write_text(text.replace(edit[0], edit[1], 1), encoding="utf-8")


def run(folder: Path, *words: str, deadline_s: float = 100.0) -> str:
    """Return what Python prints in the copy."""
    packages = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=deadline_s
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_each_recipe_names_the_files_that_are_touched_and_not_too_many() -> None:
    assert listed() == {name: set(files) for name, files in RECIPES.items()}
    assert max(map(len, RECIPES.values())) <= MOST_FILES


def test_flags_follow_from_fields_choices_and_families(copy: Path) -> None:
    """A flag, and the choices of a schedule of learning rates and of a pipeline."""
    table = (copy / FLAGS_DOC).read_text(encoding="utf-8")
    assert "| `--log-weight-norm` |" in table and "wsd, polynomial, inverse" in table and "zb-h1, afab" in table
    assert "| `--kite-size` |" in table


def test_a_run_trains_by_a_new_schedule_and_logs_what_was_added(copy: Path, tmp_path: Path) -> None:
    """A learning-rate schedule, a flag, a callback, a metric, in one training of the copy."""
    prefix = write_corpus(tmp_path)
    sizes = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --batch-size 2 --gas 1"
    words = (
        f"{sizes} --train-iters 4 --lr 1e-3 --warmup 0 --eval-iters 0 --log-interval 1 --device cpu --progress plain"
    )
    more = f"--tokenizer-path {TOKENIZER} --data-path {prefix} --save {tmp_path / 'run'} --split 900,50,50"
    run(copy, "pretrain_gpt2.py", *words.split(), *more.split(), "--log-weight-norm", "--lr-decay-style", "polynomial")
    from megatron.training.callbacks.metrics_writer import read_metrics

    records = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    rates = [record["learning_rate"] for record in records]
    assert rates == pytest.approx([1e-3 * (1 - n / 4) ** 2 for n in (1, 2, 3, 4)])
    assert all(record["weight_norm"] > 0 and record["slowest_s"] > 0 for record in records)


def test_a_family_is_known_and_planned(copy: Path) -> None:
    sizes = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --kite-size 5"
    shown = run(copy, "examples/kite/pretrain_kite.py", *sizes.split(), "--data-path", "none", "--dry-run")
    assert "hidden 16, 4 heads" in shown


def test_a_family_can_be_compared_over_layouts_by_its_name(copy: Path) -> None:
    shown = run(copy, "tools/check_layout.py", "--help")
    assert "{gpt2,t5,llama,mpt,bert,kite}" in shown.replace("\n", "").replace(" ", "") or "kite" in shown


@pytest.mark.slow
def test_the_tests_of_families_hold_for_a_new_one(copy: Path) -> None:
    """The sibling of the short run: the names come from the registry in each of these files."""
    shown = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/models/test_registry.py", deadline_s=600.0)
    assert "failed" not in shown
    words = "--model kite --model-parallel-size 2 --steps 1".split()
    assert "kite" not in run(copy, "tools/check_layout.py", *words, deadline_s=600.0)


def test_a_pipeline_schedule_is_proved_and_chosen_by_its_name(copy: Path) -> None:
    program = (
        "from tds.schedule import schedule_named\n"
        "from tds.schedule.validate import validate\n"
        "from megatron.config import parse\n"
        "validate([schedule_named('afab')(4, 8, stage) for stage in range(4)], 8)\n"
        "line = '--pipe-parallel-size 2 --pipeline-schedule afab --data-path none --vocab-size 64 --dry-run'\n"
        "print(parse(line.split(), world_size=2).parallel.schedule)\n"
    )
    assert run(copy, "-c", program).split() == ["afab"]
