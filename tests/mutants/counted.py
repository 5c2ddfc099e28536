"""Mistakes in masks that no layout changes, in attention that drops by them, and in --deterministic."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

COUNTED = "tests/mpu/test_random_counted.py"
PARTS = f"{COUNTED}::test_every_rank_draws_its_part_of_the_mask_of_one_process"
PARITY = "tests/parity/test_dropout.py"
DROPPED = "tests/ops/test_dropped_attention.py"
SETTLED = "tests/training/test_determinism.py"

COUNTED_MASKS = (
    Mutant(
        "a round of Philox takes the lower half of a product for the upper one",
        "megatron/mpu/random.py",
        "    mixed = (product >> 32) ^ word\n",
        "    mixed = product ^ word\n",
        (f"{COUNTED}::test_philox_gives_the_known_answers",),
    ),
    Mutant(
        "all rounds of Philox use the same key",
        "megatron/mpu/random.py",
        "        first, second = (first + KEY_STEPS[0]) & WORD, (second + KEY_STEPS[1]) & WORD\n",
        "",
        (f"{COUNTED}::test_philox_gives_the_known_answers",),
    ),
    Mutant(
        "the masks of a hidden slice are those of the first one",
        "megatron/mpu/random.py",
        "columns=_columns(column, width),",
        "columns=_columns(0, width),",
        (PARTS,),
    ),
    Mutant(
        "a slice that begins amidst four columns takes the first of them",
        "megatron/mpu/random.py",
        "whole[..., columns.start % LANES :]",
        "whole[..., 0:]",
        (PARTS,),
    ),
    Mutant(
        "the heads of every tensor rank drop like the first ones",
        "megatron/mpu/random.py",
        "_range(heads, x.device, plane)",
        "_range(heads, x.device)",
        (PARTS,),
    ),
    Mutant(
        "samples are dealt to replicas in turn",
        "megatron/mpu/random.py",
        "(at.first + at.micro_batch)",
        "(self.data_rank + at.micro_batch)",
        (PARTS, f"{PARITY}::test_gpt2_drops_what_one_process_drops"),
    ),
    Mutant(
        "every block of rows drops like the first",
        "megatron/mpu/random.py",
        "words = philox((groups, part, samples, planes), key)",
        "words = philox((groups, rows[: len(part)], samples, planes), key)",
        (f"{COUNTED}::test_working_in_blocks_changes_no_mask",),
    ),
    Mutant(
        "each step drops the elements of the first one",
        "megatron/mpu/random.py",
        "place = (self.seed, self.position.step, layer, site)",
        "place = (self.seed, 0, layer, site)",
        (f"{COUNTED}::test_every_other_difference_of_place_gives_another_mask",),
    ),
    Mutant(
        "the sites of a layer drop the same elements",
        "megatron/mpu/random.py",
        "place = (self.seed, self.position.step, layer, site)",
        "place = (self.seed, self.position.step, layer)",
        (f"{COUNTED}::test_every_other_difference_of_place_gives_another_mask",),
    ),
    Mutant(
        "a step of a growing batch counts its micro-batches as a whole one has them",
        "megatron/training/train_step.py",
        "DropoutKey(step, micro_batch, first)",
        "DropoutKey(step, micro_batch, self.share.first)",
        (f"{PARITY}::test_a_growing_batch_drops_what_one_process_drops",),
    ),
    Mutant(
        "attention that drops by masks sees the future",
        "megatron/ops/attention.py",
        "        mask = causal_mask(query, key) if is_causal else mask\n",
        "",
        (f"{DROPPED}::test_attention_that_drops_nothing_is_torchs",),
    ),
    Mutant(
        "attention with a bias and masks is scaled",
        "megatron/ops/biased_attention.py",
        "added, drop=drop, scale=1.0)",
        "added, drop=drop)",
        (f"{DROPPED}::test_biased_attention_that_drops_nothing_is_torchs",),
    ),
    Mutant(
        "the flag draws the fast masks",
        "megatron/training/setup.py",
        "    if config.model.layout_independent_dropout:\n",
        "    if False:\n",
        (f"{PARITY}::test_gpt2_drops_what_one_process_drops",),
    ),
    Mutant(
        "cuBLAS is not told to repeat itself",
        "megatron/training/device_setup.py",
        "os.environ.setdefault(WORKSPACE, WORKSPACES[0])",
        "os.environ.get(WORKSPACE, WORKSPACES[0])",
        (f"{SETTLED}::test_cuda_is_told_to_repeat_itself_before_it_is_used",),
    ),
    Mutant(
        "a run on CUDA does not say that it resumes inexactly",
        "megatron/training/device_setup.py",
        '    elif kind == "cuda":\n',
        '    elif kind == "gpu":\n',
        (f"{SETTLED}::test_the_start_table_says_how_exactly_a_run_resumes",),
    ),
    Mutant(
        "attention asks for its samples when it drops",
        "megatron/mpu/random.py",
        "_range(samples, x.device, sample).view(-1, 1, 1, 1)",
        "_range(samples, x.device, self._first_sample(samples)).view(-1, 1, 1, 1)",
        ("tests/mpu/test_random_counted.py::test_attention_keeps_the_place_where_it_began",),
    ),
)
