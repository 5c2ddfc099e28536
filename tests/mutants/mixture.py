"""Mistakes in mixtures: which corpus a sample comes from, phases, cursors and what a checkpoint must agree with."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LOOP = "tests/data/test_interleave.py::test_it_equals_a_loop_over_times"
NEAR = "tests/data/test_interleave.py::test_counts_stay_near_their_shares_for_ever"
ANY_CHANGE = "tests/data/test_mixture.py::test_no_sample_is_missed_or_read_twice_whatever_changes"
UNDISTURBED = "tests/data/test_mixture.py::test_a_resumed_run_reads_what_an_undisturbed_one_reads"
MIXED = "tests/data/test_mixed_samples.py"

MIXTURE = (
    Mutant(
        "shares are rounded down instead of to the nearest",
        "megatron/data/blended_dataset.py",
        "(2 * num_samples * self.weight + self.total) // (2 * self.total)",
        "num_samples * self.weight // self.total",
        (LOOP,),
    ),
    Mutant(
        "counts are computed in floating point",
        "megatron/data/blended_dataset.py",
        "(2 * num_samples * self.weight + self.total) // (2 * self.total)",
        "int(num_samples * (self.weight / self.total) + 0.5)",
        (NEAR,),
    ),
    Mutant(
        "the two heaviest groups are put together first",
        "megatron/data/blended_dataset.py",
        "(weight, rank, number) for number",
        "(-weight, rank, number) for number",
        (LOOP,),
    ),
    Mutant(
        "the place in the list decides between corpora of one weight",
        "megatron/data/blended_dataset.py",
        "return BlendIndex(self.weights, self.ranks)",
        "return BlendIndex(self.weights)",
        (UNDISTURBED,),
    ),
    Mutant(
        "a phase begins at each corpus's first sample",
        "megatron/data/blended_dataset.py",
        "return corpus, phase.cursors[corpus] + place",
        "return corpus, place",
        (ANY_CHANGE,),
    ),
    Mutant(
        "a resumed run begins a phase though its weights are what they were",
        "megatron/data/blended_dataset.py",
        "elif self.phases[-1].weights != weights:",
        "else:",
        (UNDISTURBED,),
    ),
    Mutant(
        "a phase counts from the start of the run",
        "megatron/data/blended_dataset.py",
        "phase.interleaving.locate(index - phase.start)",
        "phase.interleaving.locate(index)",
        ("tests/data/test_mixture.py::test_a_phase_starts_where_the_schedule_says_and_at_the_cursors",),
    ),
    Mutant(
        "corpora of a checkpoint are known by their names",
        "megatron/data/blended_dataset.py",
        "now |= {corpus.fingerprint: corpus for corpus in order.corpora}\n"
        "    matches = {name: now[text].name for name, text in saved.fingerprints.items() if text in now}",
        "now = {corpus.name: corpus for corpus in order.corpora}\n"
        "    matches = {name: name for name in saved.fingerprints if name in now}",
        (
            "tests/data/test_mixture.py::test_another_fingerprint_is_an_error_that_says_what_has_changed",
            "tests/data/test_mixture.py::test_corpora_are_known_by_fingerprint_and_not_by_name",
        ),
    ),
    Mutant(
        "after a change that was allowed all corpora start anew",
        "megatron/data/blended_dataset.py",
        "        cursors=by_number(cursors),\n",
        "",
        ("tests/data/test_mixture.py::test_another_fingerprint_is_an_error_that_says_what_has_changed",),
    ),
    Mutant(
        "the tokenizer is no part of a corpus's fingerprint",
        "megatron/data/blended_dataset.py",
        "{(tokenizer or 'unknown')[:16]}",
        "{'unknown'}",
        (f"{MIXED}::test_the_fingerprint_changes_with_all_that_changes_samples",),
    ),
    Mutant(
        "a step of a schedule begins in the middle of a sample",
        "megatron/data/dataset_builder.py",
        "-(-tokens // tokens_per_sample)",
        "tokens // tokens_per_sample",
        ("tests/data/test_corpora.py::test_a_schedule_starts_with_the_weights_of_the_path_and_counts_whole_samples",),
    ),
    Mutant(
        "validation follows the schedule of training",
        "megatron/data/dataset_builder.py",
        "paths.schedule(length) if number == 0 else",
        "paths.schedule(length) if number <= 2 else",
        (f"{MIXED}::test_a_schedule_changes_the_weights_after_so_many_tokens",),
        refuses=True,
    ),
    Mutant(
        "corpora that are mixed are cut alike",
        "megatron/models/t5/data.py",
        "self._key = (draws, seed) if draws else (seed,)",
        "self._key = (seed,)",
        (f"{MIXED}::test_corpora_of_t5_do_not_share_their_draws",),
    ),
    Mutant(
        "a sample is read at its number in the run",
        "megatron/data/blended_dataset.py",
        "            return part[place]\n",
        "            return part[index]\n",
        (f"{MIXED}::test_each_sample_is_the_next_one_of_its_corpus",),
    ),
    Mutant(
        "the samples of training and of their own paths are cut by --split all the same",
        "megatron/data/dataset_builder.py",
        "    if paths.are_apart:\n        return [(0, token_file.num_documents)] * 3\n",
        "",
        (f"{MIXED}::test_paths_of_their_own_are_read_whole",),
    ),
    Mutant(
        "a corpus of weight 0 is evaluated",
        "megatron/data/dataset_builder.py",
        "for weight, prefix in corpora if weight)",
        "for weight, prefix in corpora)",
        (f"{MIXED}::test_a_corpus_without_weight_is_not_evaluated_and_stays_in_training",),
        refuses=True,
    ),
    Mutant(
        "nobody hears that company changes what is drawn",
        "megatron/data/blended_dataset.py",
        "if (len(saved.fingerprints) == 1) != (len(order.corpora) == 1):",
        "if len(saved.fingerprints) < 1:",
        ("tests/data/test_mixture.py::test_company_that_changes_what_is_drawn_is_told",),
    ),
    Mutant(
        "the fingerprint of an old checkpoint is held against another kind",
        "megatron/data/blended_dataset.py",
        'return corpus.fingerprint if "." in was else _samples(corpus)',
        "return corpus.fingerprint",
        ("tests/data/test_mixture.py::test_checkpoints_of_a_single_corpus_held_its_fingerprint_alone",),
    ),
    Mutant(
        "one set in three files takes all corpora their span flags",
        "megatron/config/data.py",
        "return not self.flag_of_prefix or len(self.flag_of_set) < len(self.flag_of_prefix)",
        "return not self.flag_of_set",
        ("tests/config/test_t5.py::test_a_set_in_three_files_among_others_leaves_them_their_flags",),
        refuses=True,
    ),
    Mutant(
        "a step of a schedule in the middle of the last sample is taken to act",
        "megatron/arguments/unused_flags.py",
        "-(-tokens // each) >= samples]",
        "tokens // each >= samples]",
        ("tests/config/test_data.py::test_a_schedule_needs_corpora_and_tokens_that_are_reached",),
    ),
    Mutant(
        "a run without validation asks for its path",
        "megatron/arguments/unused_flags.py",
        "    validates = evaluates and batch.eval_interval > 0 and not eval_only\n",
        "    validates = evaluates\n",
        (
            "tests/config/test_data.py::test_paths_that_are_missing_beside_others_are_told_at_once",
            "tests/config/test_data.py::test_paths_of_splits_that_are_not_read_are_noted",
        ),
    ),
    Mutant(
        "the fingerprint forgets how documents are filled in",
        "megatron/data/gpt_dataset.py",
        'key += f":{self.fim.key}"',
        'key += ":fim"',
        ("tests/data/test_gpt2_samples.py::test_fingerprint_changes_with_all_that_changes_the_order",),
    ),
)
