"""Mistakes in what the tools tell of data, in merging, and in the benchmark of the data."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

INSPECT = "tests/tools/test_inspect_data.py"
VIEW = "tests/data/inspect/test_inspect_view.py"
FACTS = "tests/data/inspect/test_inspect_facts.py"
MERGE = "tests/tools/test_merge_data.py"
COUNT = "tests/tools/test_count_tokens.py"
BENCHMARK = "tests/benchmarks/test_data.py"
SET_UP = "tests/tools/test_set_up.py"
STORIES = "tests/tools/test_make_sample_data.py"

TOOLS = (
    Mutant(
        "a seed of the stories changes nothing",
        "tools/make_sample_data.py",
        "random.Random(seed)",
        "random.Random(1234)",
        (f"{STORIES}::test_a_seed_gives_the_same_stories_on_every_machine",),
    ),
    Mutant(
        "one language comes first, so that the splits hold the other alone",
        "tools/make_sample_data.py",
        "chinese(draw) if index % 2 else english(draw)",
        "english(draw) if index < number // 2 else chinese(draw)",
        (f"{STORIES}::test_languages_take_turns_and_no_story_comes_twice",),
    ),
    Mutant(
        "a text that T5 is to fill has no gap",
        "run_t5.sh",
        "旺旺去小河边散步。<extra_id_0>",
        "旺旺去小河边散步。",
        (f"{STORIES}::test_prompts_of_the_run_scripts_are_sentences_of_the_stories_in_both_languages[run_t5.sh]",),
    ),
    Mutant(
        "a dry run counts with the vocabulary of an older sample",
        "tools/run.sh",
        """  elif [ -z "$is_dry" ]; then\n    "$PYTHON" """,
        """  elif [ -z "$is_dry" ] || [ -e "$sample/tokenizer.json" ]; then\n    [ -n "$is_dry" ] || "$PYTHON" """,
        ("tests/test_run_script.py::test_a_dry_run_counts_with_the_sample_that_the_run_will_make",),
    ),
    Mutant(
        "Chinese names have other tokens in each sentence",
        "tools/make_sample_data.py",
        '    return CHINESE_WORDS.sub(r"\\n\\g<0>\\n", text)\n',
        "    return text\n",
        (f"{STORIES}::test_a_chinese_name_is_a_word_of_the_vocabulary",),
    ),
    Mutant(
        "the samples shown are not those asked for",
        "tools/inspect_data.py",
        "data_size=1, samples_consumed=flags.first\n",
        "data_size=1, samples_consumed=flags.first + 1\n",
        (f"{INSPECT}::test_what_is_shown_is_what_the_training_reads",),
    ),
    Mutant(
        "the table shows the input where the label stands",
        "megatron/data/inspect/view.py",
        '"label": stream.labels}',
        '"label": stream.tokens}',
        (f"{INSPECT}::test_what_is_shown_is_what_the_training_reads",),
    ),
    Mutant(
        "facts of token files wait for torch",
        "megatron/data/inspect/view.py",
        "if TYPE_CHECKING:\n    from torch import Tensor\n",
        "from torch import Tensor\n",
        (f"{INSPECT}::test_facts_load_no_torch_and_samples_no_compiler",),
    ),
    Mutant(
        "a sample of a mixture names the next sample's corpus",
        "tools/inspect_data.py",
        "corpus, place = samples.order.locate(index)",
        "corpus, place = samples.order.locate(index + 1)",
        (f"{INSPECT}::test_samples_of_a_mixture_name_their_corpus",),
    ),
    Mutant(
        "a document ends before its end-of-document token",
        "megatron/data/inspect/view.py",
        "is_start[1:] |= stream.ends[:-1]",
        "is_start[1:] |= stream.ends[1:]",
        (f"{VIEW}::test_documents_that_are_not_kept_apart_are_told_by_their_ends",),
    ),
    Mutant(
        "tokens without loss are shown as those with it",
        "megatron/data/inspect/view.py",
        "own = has_loss[section.start : section.stop]",
        "own = has_loss[: section.stop - section.start]",
        (f"{VIEW}::test_documents_stand_under_headings_and_a_masked_end_in_brackets",),
    ),
    Mutant(
        "a quantile is one document short",
        "megatron/data/inspect/statistics.py",
        'np.searchsorted(below, needed, "left")',
        'np.searchsorted(below, needed - 1, "left")',
        (f"{FACTS}::test_lengths_are_counted_alike_in_blocks_of_any_size",),
    ),
    Mutant(
        "only the first documents' ends are looked at",
        "megatron/data/inspect/statistics.py",
        "np.linspace(0, token_file.num_documents - 1, count)",
        "np.linspace(0, count - 1, count)",
        (f"{FACTS}::test_ends_are_looked_at_over_the_whole_file",),
    ),
    Mutant(
        "inputs of another vocabulary are merged",
        "tools/merge_data.py",
        "for prefix, sidecar in named[1:]:",
        "for prefix, sidecar in named[:1]:",
        (f"{MERGE}::test_another_vocabulary_is_refused_with_both_named",),
    ),
    Mutant(
        "a merge claims an end that some documents lack",
        "tools/merge_data.py",
        "return ends.pop() if len(ends) == 1 else None",
        "return max(ends, key=lambda end: end is not None)",
        (f"{MERGE}::test_an_end_that_some_documents_lack_is_not_claimed",),
    ),
    Mutant(
        "a merge knows the vocabulary of files that do not tell it",
        "tools/merge_data.py",
        "vocab_size=known.vocab_size if known else None",
        "vocab_size=known.vocab_size if known else 50_000",
        (f"{MERGE}::test_megatrons_files_are_joined_without_a_sidecar",),
    ),
    Mutant(
        "epochs are those of all documents, not of the training's",
        "tools/count_tokens.py",
        'of = row["splits"].get("train", row)',
        "of = row",
        (f"{COUNT}::test_a_run_draws_by_weight_and_epochs_count_what_training_reads",),
    ),
    Mutant(
        "ratios compare medians of different rounds",
        "benchmarks/turns.py",
        "for a, b in zip(ours, theirs, strict=True)",
        "for a, b in zip(ours, sorted(theirs), strict=True)",
        (f"{BENCHMARK}::test_turns_rotate_and_ratios_are_taken_within_rounds",),
    ),
    Mutant(
        "what a contender prints stands in the tables",
        "benchmarks/turns.py",
        "        os.dup2(sys.stdout.fileno(), 1)\n",
        "",
        ("tests/benchmarks/test_turns.py::test_every_process_answers_and_what_it_prints_is_kept_out_of_the_tables",),
    ),
    Mutant(
        "reading is held against one step instead of ten",
        "benchmarks/data.py",
        "needed = {family: TIMES * rate",
        "needed = {family: rate",
        (f"{BENCHMARK}::test_reading_is_held_against_ten_steps",),
    ),
    Mutant(
        "contenders that write other tokens are compared",
        "benchmarks/data_preprocessing.py",
        "if done.tokens != expected:",
        "if not done.tokens:",
        (f"{BENCHMARK}::test_contenders_of_a_tokenizer_must_write_the_same",),
    ),
    Mutant(
        "a complete environment of another checkout is installed over",
        "tools/set_up.py",
        "            found = ask(python, wanted)\n",
        "            found = ask(python, wanted)._replace(lacking=wanted, checkout='')\n",
        (f"{SET_UP}::test_an_environment_of_another_checkout_whose_packages_fit_is_used_as_it_is",),
    ),
    Mutant(
        "packages are installed into the environment of another checkout",
        "tools/set_up.py",
        "                if is_anothers:\n",
        "                if is_anothers and not wanted:\n",
        (f"{SET_UP}::test_an_environment_of_another_checkout_that_does_not_fit_is_told_whose_it_is",),
    ),
    Mutant(
        "what .venv lacks is said of the Python that was started",
        "tools/set_up.py",
        "                    who, what = str(VENV), found.lacking\n",
        "                    who, what = who, found.lacking\n",
        (f"{SET_UP}::test_what_is_lacking_is_said_of_the_python_that_lacks_it",),
    ),
    Mutant(
        "what slow tests alone use is installed into the environment of another checkout",
        "tools/set_up.py",
        '    if Path(python) != VENV / "bin" / "python" or is_of_another(found.checkout):',
        '    if Path(python) != VENV / "bin" / "python":',
        (f"{SET_UP}::test_a_python_of_somebody_else_is_not_added_to",),
    ),
    Mutant(
        "no test runs where what slow tests alone use cannot be had",
        "tools/set_up.py",
        "        except SetUpError as error:\n            log(",
        "        except KeyError as error:\n            log(",
        (f"{SET_UP}::test_what_slow_tests_alone_use_is_added_where_it_can_be_had",),
        refuses=True,
    ),
    Mutant(
        "pip tells what is there already",
        "tools/set_up.py",
        "                if not line.startswith(without):\n",
        "                if line:\n",
        (f"{SET_UP}::test_pips_lines_about_what_is_there_already_are_left_out",),
    ),
    Mutant(
        "two checkouts fill the environment that both link to at once",
        "tools/set_up.py",
        "home = VENV.resolve().parent",
        "home = VENV.parent",
        (f"{SET_UP}::test_a_second_set_up_waits_for_the_first",),
    ),
    Mutant(
        "git lists the user's data",
        ".gitignore",
        "/data/\n",
        "/data/sample/\n",
        ("tests/docs/test_docs.py::test_what_the_pages_let_a_user_write_is_no_change_to_the_repository",),
    ),
)
