"""A run of megatron-core continues here, in any layout, and a run of ours continues there, with equal losses.

megatron-core trains in fp32 with its FP32Optimizer over torch's AdamW, or with its DistributedOptimizer, and saves with
``megatron.core.dist_checkpointing``. Both programs read the same tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.checkpoint.one_process import open_folder
from megatron.checkpoint.torch_dist.export import ExportOptions, export_torch_dist
from megatron.data.mock_dataset import MockTokens
from megatron.errors import EXIT_CODES, StopRequest
from tests.helpers.megatron_core import requires_megatron_core, run_megatron_core
from tests.helpers.runs import launch_script

pytestmark = [pytest.mark.slow, requires_megatron_core]
PROGRAM = "tests.megatron_core.checkpoint_program"
VOCAB_SIZE, SEQ_LENGTH, BATCH, SEED = 48, 12, 4, 1234
SAVED, LAST = 10, 20
BOUND = 1e-6
"""Largest difference of two losses, which are about 3.8: four units in the last place of fp32."""
GPT = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 32, "max_position_embeddings": 16,
    "padded_vocab_size": VOCAB_SIZE, "seq_length": SEQ_LENGTH, "global_batch_size": BATCH, "micro_batch_size": BATCH,
    "train_iters": LAST,
}  # fmt: skip
LLAMA = {
    **GPT, "swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True, "group_query_attention": True, "num_query_groups": 2,
    "qk_layernorm": True,
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "qk_layernorm": False, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24,
    "moe_layer_freq": 1, "moe_shared_expert_intermediate_size": None, "moe_router_load_balancing_type": "none",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {**GPT, "tensor_model_parallel_size": 2},
    "llama": {**LLAMA, "use_distributed_optimizer": True},
    "mixtral": {**MIXTRAL, "expert_model_parallel_size": 2},
}
"""Name -> arguments of megatron-core's run on 2 ranks: tensor, data or expert parallelism."""
Losses = dict[int, tuple[float, float]]
"""Step -> (loss, learning rate)."""
SCHEDULE = "--lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 4 --weight-decay 0.1 --adam-beta2 0.95"
LAYOUTS = {
    "one rank": (1, "--batch-size 4"),
    "tp 2 pp 2": (4, "--batch-size 1 --gas 4 --model-parallel-size 2 --pipe-parallel-size 2"),
    "dp 2 ep 2": (2, "--batch-size 2 --expert-model-parallel-size 2"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of megatron-core: MODEL.json, and checkpoints of step 10 in MODEL."""
    folder = tmp_path_factory.mktemp("megatron-core")
    samples = MockTokens(VOCAB_SIZE, SEQ_LENGTH, SEED)
    np.save(folder / "tokens.npy", np.stack([samples[idx] for idx in range(LAST * BATCH)]))
    jobs = [{"name": name, "args": args, "last": LAST, "save": name, "save_at": SAVED} for name, args in MODELS.items()]
    run_megatron_core(PROGRAM, folder, num_ranks=2, deadline_s=120, jobs=jobs)
    return folder


def train(folder: Path, name: str, layout: str, flags: str, code: int = 0) -> Losses:
    """Train with ``pretrain_gpt2.py`` in ``folder``/NAME and return step -> (loss, learning rate).

    Args:
        code: expected exit code of the ranks.
    """
    num_ranks, layout_flags = LAYOUTS[layout]
    argv = (
        f"--save {folder / name} --data-path mock --tokenizer-type NullTokenizer --seq-length {SEQ_LENGTH} "
        f"--seed {SEED} "
        f"--train-iters {LAST} {SCHEDULE} --hidden-dropout 0 --attention-dropout 0 --device cpu --fp32 --eval-iters 0 "
        f"--progress plain --log-interval 1 {layout_flags} {flags}"
    ).split()
    log = folder / f"{name}.log"
    codes = launch_script(num_ranks, argv, log, deadline_s=100)
    assert codes == [code] * num_ranks, log.read_text()
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: (record["loss"], record["learning_rate"]) for record in records if "loss" in record}


def read_losses(folder: Path, name: str) -> Losses:
    """Return step -> (loss, learning rate) of a run of megatron-core."""
    content = json.loads((folder / f"{name}.json").read_text())
    return {int(step): (loss, rate) for step, (loss, rate, _) in content.items()}


def assert_equal(actual: Losses, expected: Losses, first: int, last: int = LAST) -> None:
    """Check losses and learning rates of the steps from ``first`` to ``last``."""
    steps = range(first, last + 1)
    assert [*actual] == [*steps]
    assert [actual[step][1] for step in steps] == pytest.approx([expected[step][1] for step in steps], rel=1e-12)
    differences = {step: actual[step][0] - expected[step][0] for step in steps}
    print(f"worst loss difference {max(map(abs, differences.values())):.1e}, bound {BOUND:.0e}")
    assert all(abs(difference) <= BOUND for difference in differences.values()), differences


@pytest.mark.parametrize(
    ("model", "layout"),
    [("gpt", "one rank"), ("gpt", "tp 2 pp 2"), ("llama", "tp 2 pp 2"), ("mixtral", "dp 2 ep 2")],
)
def test_run_of_megatron_core_continues_here(folder: Path, model: str, layout: str) -> None:
    name = f"{model}-here-{layout.replace(' ', '')}"
    actual = train(folder, name, layout, f"--load {folder / model}")
    assert_equal(actual, read_losses(folder, model), SAVED + 1)
    assert "lr-step-offset -1" in (folder / f"{name}.log").read_text()


def train_and_export(folder: Path, model: str, layout: str) -> Losses:
    """Train from the weights of megatron-core's run and export step 10; return the losses of all steps."""
    flags = f"--load {folder / model} --finetune --save-interval {SAVED} --lr-step-offset -1"
    losses = train(folder, f"{model}-ours", layout, flags)
    export(folder, f"{model}-ours", SAVED, MODELS[model], f"{model}-exported")
    return losses


def export(folder: Path, run: str, step: int, args: dict[str, Any], output: str) -> None:
    """Export a checkpoint of our run ``folder``/RUN to ``folder``/OUTPUT, for a run of megatron-core with ``args``."""
    options = ExportOptions(
        uses_distributed_optimizer=args.get("use_distributed_optimizer", False), has_torch_adam=True,
        has_expert_parallelism="expert_model_parallel_size" in args,
    )  # fmt: skip
    _, notes = export_torch_dist(
        open_folder(folder / run / "checkpoints" / f"step-{step:08d}"), folder / output, options
    )
    assert notes == []


def test_run_of_ours_continues_in_megatron_core(folder: Path) -> None:
    """From one rank to two tensor ranks, from 2 x 2 ranks to the distributed optimizer, and with experts."""
    layouts = {"gpt": "one rank", "llama": "tp 2 pp 2", "mixtral": "dp 2 ep 2"}
    expected = {model: train_and_export(folder, model, layout) for model, layout in layouts.items()}
    jobs = [
        {"name": f"{model}-there", "args": MODELS[model], "last": LAST, "load": f"{model}-exported"}
        for model in layouts
    ]
    run_megatron_core(PROGRAM, folder, num_ranks=2, deadline_s=120, jobs=jobs)
    for model, losses in expected.items():
        losses_from_saved = {step: losses[step] for step in range(SAVED + 1, LAST + 1)}
        assert_equal(read_losses(folder, f"{model}-there"), losses_from_saved, SAVED + 1)


@pytest.mark.parametrize(
    ("model", "layouts"),
    [("llama", ("tp 2 pp 2", "one rank")), ("gpt", ("one rank", "tp 2 pp 2")), ("mixtral", ("dp 2 ep 2", "one rank"))],
)
def test_chain_of_both_programs_has_the_losses_of_one_run(folder: Path, model: str, layouts: tuple[str, str]) -> None:
    """Steps 1 to 10 in megatron-core, to 13 here, to 16 in megatron-core, to 20 here in another layout."""
    expected, names = read_losses(folder, model), [f"{model}-hop{idx}" for idx in (1, 2, 3)]
    first = train(folder, names[0], layouts[0], f"--load {folder / model} --exit-interval 13", EXIT_CODES[StopRequest])
    assert_equal(first, expected, SAVED + 1, 13)
    export(folder, names[0], 13, MODELS[model], f"{names[0]}-exported")
    job = {
        "name": names[1], "args": MODELS[model], "load": f"{names[0]}-exported", "last": 16, "save": names[1],
        "save_at": 16,
    }  # fmt: skip
    run_megatron_core(PROGRAM, folder, num_ranks=2, deadline_s=120, jobs=[job])
    assert_equal(read_losses(folder, names[1]), expected, 14, 16)
    assert_equal(train(folder, names[2], layouts[1], f"--load {folder / names[1]}"), expected, 17)
