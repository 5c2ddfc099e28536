"""Mistakes in what is recorded of other people's scripts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FILES = "tests/migration/test_files.py"
START = "tests/migration/test_start.py"
A_SCRIPT = f"{START}::test_a_script_starts_with_megatrons_own_numbers"
SCHEDULES = "tests/optim/test_schedules.py"
TRANSLATE = "megatron/arguments/translate.py"

MIGRATION = (
    Mutant(
        "a script's micro-batches are those of another number of replicas",
        "tests/migration/scripts/mds-gpt.toml",
        "num_micro_batches = 2",
        "num_micro_batches = 4",
        (f"{FILES}::test_batch_sizes_multiply_to_the_global_batch",),
    ),
    Mutant(
        "a ramp-up ends a step early",
        "tests/migration/scripts/mds-gpt3-175b.toml",
        "rampup_iters = 19802",
        "rampup_iters = 19801",
        (f"{FILES}::test_samples_are_those_of_the_steps",),
    ),
    Mutant(
        "samples are steps of the whole batch while it grows",
        TRANSLATE,
        "        steps = sizes.steps_within(samples)\n",
        "        steps = samples // sizes.full\n",
        (A_SCRIPT,),
    ),
    Mutant(
        "the learning rate of a growing batch follows the steps",
        "megatron/training/trainer.py",
        "progress.samples_updated + count if by_samples",
        "(progress.updates + 1) * self.sizes.full if by_samples",
        ("tests/training/test_sample_lengths.py",),
    ),
    Mutant(
        "the warm-up is a fraction of the steps of the run",
        "megatron/optim/lr_scheduler.py",
        "self.warmup * self.decay_updates if",
        "self.warmup * 2 * self.decay_updates if",
        (f"{SCHEDULES}::test_warm_up_rises_in_equal_steps_to_lr",),
    ),
    Mutant(
        "tokens are samples of one token more",
        TRANSLATE,
        "        return in_tokens / tokens\n",
        "        return in_tokens / (tokens + 1)\n",
        (A_SCRIPT,),
    ),
    Mutant(
        "a limit of tokens ends the run a step early",
        TRANSLATE,
        "        by_tokens = sizes.steps_until(limit / tokens)\n",
        "        by_tokens = sizes.steps_within(int(limit / tokens))\n",
        (A_SCRIPT,),
    ),
    Mutant(
        "the decay follows the steps that tokens leave",
        TRANSLATE,
        '    return values.get("train_iters", BatchConfig().train_iters) if steps is None else steps\n',
        '    return values.get("train_iters", BatchConfig().train_iters)\n',
        (
            "tests/arguments/test_lengths.py::test_a_limit_of_tokens_leaves_the_decay_as_long_as_the_steps_that_were_given",
        ),
    ),
    Mutant(
        "a flag that asks for what holds is not named",
        "megatron/training/dry_run.py",
        "    if config.neutral:\n",
        "    if len(config.neutral) > 40:\n",
        (A_SCRIPT,),
    ),
    Mutant(
        "another value of a flag that holds is taken as well",
        "megatron/arguments/flag_row.py",
        "        if not self.holds or all(_same(value, self.holds) for value in values):\n",
        "        if not self.holds or values:\n",
        ("tests/arguments/test_flags_table.py::test_other_values_of_a_neutral_flag_are_refused_with_the_way_out",),
    ),
    Mutant(
        "an optimizer that keeps weight decay in the gradient is taken",
        "megatron/arguments/deepspeed_json.py",
        "    if key.is_neutral and key.holds and not any(value is one or value == one for one in key.holds):\n",
        "    if key.is_neutral and key.holds and value is None:\n",
        (f"{START}::test_a_json_file_starts_with_its_batch_sizes",),
    ),
    Mutant(
        "a section that is switched on is taken as switched off",
        "megatron/arguments/deepspeed_json.py",
        '    return value.get("enabled") is False\n\n\ndef _key_problems',
        '    return "enabled" in value\n\n\ndef _key_problems',
        (f"{START}::test_a_json_file_starts_with_its_batch_sizes",),
    ),
)
