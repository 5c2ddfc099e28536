"""What is pasted: variables that the run script has, and flags for the rest."""

from __future__ import annotations

from megatron.config import parse
from megatron.planner.layout import Layout, command_lines, script_flags, script_variables

BASE_FLAGS = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --dry-run"


def test_flags_cover_settings_without_variable() -> None:
    config = parse([*BASE_FLAGS.split(), "--ff-hidden-size", "128"], world_size=1, env={})
    layout = Layout(
        tensor=2, pipe=2, data=6, chunks=2, schedule="interleaved", num_micro_batches=4, recompute="full", zero_stage=1,
        sequence_parallel=True, offload_optimizer=True,
    )  # fmt: skip
    assert " ".join(script_flags(config, layout)) == (
        "--bf16 --pipeline-chunks 2 --zero-stage 1 --checkpoint-activations --sequence-parallel --offload-optimizer "
        "--ff-hidden-size 128"
    )
    split = Layout(pipe=2, schedule="zb-h1", recompute="selective", dtype="fp16")
    assert " ".join(script_flags(config, split)[:-2]) == (
        "--fp16 --pipeline-schedule zb-h1 --recompute-granularity selective"
    )


def test_flags_repeat_user_settings_absent_from_recipe() -> None:
    user_flags = (
        "--hidden-bias --attention-dropout 0 --hidden-dropout 0.2 --kv-hidden-size 32 --activation relu --compile "
        "--no-overlap-grad-reduce --checkpoint-activations --checkpoint-num-layers 2 --optimizer sgd"
    )
    config = parse([*BASE_FLAGS.split(), *user_flags.split()], world_size=1, env={})
    added = script_flags(config, Layout(recompute="full"))
    reparsed = parse([*BASE_FLAGS.split(), "--hidden-bias", "--attention-dropout", "0", *added], world_size=1, env={})
    assert (reparsed.model, reparsed.optimizer, reparsed.parallel) == (config.model, config.optimizer, config.parallel)
    assert "--hidden-bias" not in added and "--attention-dropout" not in added


def test_variables_use_full_nodes() -> None:
    config = parse(BASE_FLAGS.split(), world_size=1, env={})
    assigned = script_variables(config, Layout(data=24), 8)
    assert (assigned["GPUS_PER_NODE"], assigned["NNODES"]) == (8, 3)
    assert command_lines(config, Layout(), 8)[0] == "GPUS_PER_NODE=1 NNODES=1 pp_size=1 mp_size=1 \\"
