"""Which runs, layouts and mistakes ``benchmarks/same_program.py`` compares."""

from __future__ import annotations

PROGRAMS = {
    "gpt2": "pretrain_gpt2.py",
    "t5": "pretrain_t5.py",
    "bert": "examples/bert/pretrain_bert.py",
    "llama": "examples/llama/pretrain_llama.py",
    "mpt": "examples/mpt/pretrain_mpt.py",
}
SIZES = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --batch-size 2 --gas 2 --train-iters 6 --lr 3e-3 "
    "--warmup 0 --log-interval 1 --eval-iters 0 --split 900,50,50 --device cpu --progress plain"
)
GRID = "--model-parallel-size 2 --pipe-parallel-size 2"
CLIPS = {"--fp32 --clip-grad 0": 0.0, "--fp64 --clip-grad 0.1": 1e-12, "--fp32 --clip-grad 0.1": 1e-6}
"""Flags -> how far apart losses and tensors may be; every step's norm is above 0.1."""
NORM_WITHIN = 1e-5
"""How far apart the logged norms may be, which round as they are summed; with --clip-grad 0 they act on nothing."""
STOP = 3
"""Step whose checkpoint is resumed."""
LAYOUTS = [
    ("gpt2", 1, ""),
    ("gpt2", 4, GRID),
    ("gpt2", 8, f"{GRID} --zero-stage 1"),
    ("gpt2", 4, "--zero-stage 3"),
    ("gpt2", 2, "--pipe-parallel-size 2 --pipeline-schedule zb-h1 --gas 8"),
    ("gpt2", 2, "--pipe-parallel-size 2 --pipeline-chunks 2 --gas 8"),
    ("gpt2", 4, "--model-parallel-size 4 --sequence-parallel"),
    ("gpt2", 4, f"{GRID} --checkpoint-activations"),
    ("t5", 1, ""),
    ("t5", 4, GRID),
    ("t5", 3, "--pipe-parallel-size 3 --pipeline-split-rank 1"),
    ("t5", 4, "--pipe-parallel-size 2 --zero-stage 1 --bf16"),
    ("bert", 1, ""),
    ("bert", 4, GRID),
    ("bert", 8, f"{GRID} --recompute-granularity selective"),
    ("llama", 4, GRID),
    ("llama", 2, "--model-parallel-size 2 --num-query-groups 2 --packing best-fit"),
    ("llama", 2, "--pipe-parallel-size 2 --pipeline-schedule gpipe"),
    ("mpt", 4, GRID),
    ("mpt", 4, "--zero-stage 2 --clip-qkv 6"),
]
"""Family, ranks and flags of each --dry-run."""
BAD_INPUTS = [
    (PROGRAMS["gpt2"], "--no-such-flag 1"),
    (PROGRAMS["gpt2"], "--data-path none --num-layers -1 --lr much --hidden-size 30"),
    (PROGRAMS["gpt2"], "--data-path none --model-parallel-size 3"),
    (PROGRAMS["gpt2"], "--data-path {folder}/nowhere --tokenizer-path {folder}/nowhere.json --dry-run"),
    (PROGRAMS["gpt2"], "--data-path none --deepspeed_config {folder}/bad.json"),
    (PROGRAMS["t5"], "--data-path none --noise-density 2 --denoisers Q"),
    (PROGRAMS["gpt2"], "--device cpu --eval-iters 0 {data} --load {folder}/nowhere --save {folder}/unused"),
    ("tools/preprocess_data.py", "--input {folder}/nowhere --output-prefix {folder}/out --tokenizer-path none.json"),
    ("tools/plan.py", "--model gpt2 --gpus 8 --gpu abacus"),
    ("tools/inspect_checkpoint.py", "{folder}/nowhere"),
]
