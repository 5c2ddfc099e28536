"""What is pasted: variables that the run script has, and flags for the rest."""

from __future__ import annotations

from megatron.config import parse
from megatron.planner.layout import Layout, flags, lines, variables

WORDS = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --dry-run"


def test_flags_say_what_has_no_variable() -> None:
    config = parse([*WORDS.split(), "--ff-hidden-size", "128"], world_size=1, env={})
    layout = Layout(
        tensor=2, pipe=2, data=6, chunks=2, schedule="interleaved", num_micro_batches=4, recompute="full", zero_stage=1,
        sequence_parallel=True, offload_optimizer=True,
    )  # fmt: skip
    assert " ".join(flags(config, layout)) == (
        "--bf16 --pipeline-chunks 2 --zero-stage 1 --checkpoint-activations --sequence-parallel --offload-optimizer "
        "--ff-hidden-size 128"
    )
    split = Layout(pipe=2, schedule="zb-h1", recompute="selective", dtype="fp16")
    assert " ".join(flags(config, split)[:-2]) == ("--fp16 --pipeline-schedule zb-h1 --recompute-granularity selective")


def test_what_was_given_goes_along_unless_the_recipe_says_it() -> None:
    given = (
        "--hidden-bias --attention-dropout 0 --hidden-dropout 0.2 --kv-hidden-size 32 --activation relu --compile "
        "--no-overlap-grad-reduce --checkpoint-activations --checkpoint-num-layers 2 --optimizer sgd"
    )
    config = parse([*WORDS.split(), *given.split()], world_size=1, env={})
    added = flags(config, Layout(recompute="full"))
    again = parse([*WORDS.split(), "--hidden-bias", "--attention-dropout", "0", *added], world_size=1, env={})
    assert (again.model, again.optimizer, again.parallel) == (config.model, config.optimizer, config.parallel)
    assert "--hidden-bias" not in added and "--attention-dropout" not in added


def test_nodes_are_whole() -> None:
    config = parse(WORDS.split(), world_size=1, env={})
    assigned = variables(config, Layout(data=24), 8)
    assert (assigned["GPUS_PER_NODE"], assigned["NNODES"]) == (8, 3)
    assert lines(config, Layout(), 8)[0] == "GPUS_PER_NODE=1 NNODES=1 pp_size=1 mp_size=1 \\"
