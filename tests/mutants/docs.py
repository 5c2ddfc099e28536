"""Mistakes in the pages, in what makes a site of them, and in where files lie."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SITE = "tests/docs/test_site.py"
MIGRATION = "tests/docs/test_migration.py"
TROUBLE = "tests/docs/test_troubleshooting.py::test_each_message_is_in_the_source[english]"
PAGES = "tests/docs/test_docs.py"
PLANNED = "tests/docs/test_planner.py"
BUILD = f"{SITE}::test_the_site_builds_without_a_warning_and_fetches_nothing"

DOCS_MISTAKES = (
    Mutant(
        "a page of docs links to one that is not there",
        "docs/index.md",
        "[The first hour](first_hour.md)",
        "[The first hour](first_hours.md)",
        (BUILD,),
    ),
    Mutant(
        "a link of docs has an anchor that is not there",
        "docs/zh/parallelism.md",
        "../glossary.md#letters-of-shapes",
        "../glossary.md#letters-of-shape",
        (BUILD,),
    ),
    Mutant(
        "a page of docs is left out of the navigation",
        "mkdocs.yml",
        "      - Troubleshooting: troubleshooting.md\n",
        "",
        (f"{SITE}::test_every_page_is_in_the_navigation_once",),
    ),
    Mutant(
        "a page without a Chinese sibling has no reason",
        "mkdocs.yml",
        "    flags.md: made by a program from the flags' own help, which is English\n",
        "",
        (f"{SITE}::test_every_page_has_a_sibling_in_chinese_or_a_reason",),
    ),
    Mutant(
        "the site lets dead anchors pass",
        "mkdocs.yml",
        "anchors: warn, absolute_links",
        "anchors: info, absolute_links",
        (f"{SITE}::test_dead_links_anchors_and_pictures_end_the_build",),
    ),
    Mutant(
        "links out of docs are not pointed at their copies",
        "tools/docs.py",
        "else COPIES + aim",
        "else aim",
        (f"{SITE}::test_links_out_of_the_pages_and_into_them_are_pointed_at_copies",),
    ),
    Mutant(
        "anchors of copied links get lost",
        "tools/docs.py",
        'posixpath.dirname(uri) or ".") + anchor',
        'posixpath.dirname(uri) or ".")',
        (f"{SITE}::test_links_out_of_the_pages_and_into_them_are_pointed_at_copies",),
    ),
    Mutant(
        "a page of docs is not linked to its sibling",
        "tools/docs.py",
        '    return FRONT.get(uri) or (uri.removeprefix("zh/")',
        '    return FRONT.get(uri) or (uri.removeprefix("zh-/")',
        (BUILD,),
    ),
    Mutant(
        "migration calls a refused flag the same",
        "docs/migration.md",
        "| `--step-batch-size-schedule` | refused |",
        "| `--step-batch-size-schedule` | the same |",
        (f"{MIGRATION}::test_each_flag_is_what_the_command_line_makes_of_it",),
    ),
    Mutant(
        "migration names another flag in place of a refused one",
        "docs/migration.md",
        "| refused | `--rampup-batch-size` |",
        "| refused | `--global-batch-size` |",
        (f"{MIGRATION}::test_what_a_refused_flag_is_replaced_by_is_what_its_error_says",),
    ),
    Mutant(
        "an error is reworded and the page of messages is not",
        "megatron/checkpoint/loading.py",
        "the newest checkpoint must verify, none older",
        "the newest checkpoint has to verify, none older",
        (TROUBLE,),
    ),
    Mutant(
        "the picture of ZeRO cuts gradients from stage 1 on",
        "tools/docs.py",
        '"gradients": (4, 2)',
        '"gradients": (4, 1)',
        ("tests/docs/test_pictures.py::test_the_bytes_of_the_picture_are_those_of_the_table_of_memory",),
    ),
    Mutant(
        "a figure of the planner's output on the page is old",
        "docs/planner.md",
        "stage 0 needs 124.47 GB",
        "stage 0 needs 124.74 GB",
        (f"{PLANNED}::test_the_page_has_what_the_planner_prints[one layout that does not fit]",),
    ),
    Mutant(
        "an output on the planner's page has no whole command",
        "docs/planner.md",
        "    python tools/plan.py --fits",
        "    plan.py --fits",
        (f"{PLANNED}::test_every_output_of_the_page_has_its_command",),
    ),
    Mutant(
        "a page says that sequence parallelism sends no byte more",
        "docs/zh/parallelism.md",
        "每步传 57.3 GB",
        "每步传 46.0 GB",
        (f"{PLANNED}::test_the_price_of_sequence_parallelism_is_the_planners[zh/parallelism.md]",),
    ),
    Mutant(
        "a published run has another figure on the Chinese page",
        "docs/zh/planner.md",
        "| 8 | 0.97 to 1.07 |",
        "| 8 | 0.97 to 1.17 |",
        (f"{PAGES}::test_the_chinese_page_has_the_figures_of_tables_that_programs_make[planner.md-1-4]",),
    ),
    Mutant(
        "a row of the English page is missing on the Chinese one",
        "docs/zh/scaling.md",
        "| 更新 | 参数的全部状态读写一遍 | ZeRO，更大的步 |\n",
        "",
        (
            f"{PAGES}::test_the_chinese_page_has_the_fences_and_rows_of_the_english_one[docs/scaling.md-docs/zh/scaling.md]",
        ),
    ),
    Mutant(
        "an output differs on the Chinese page",
        "docs/zh/planner.md",
        "MFU 49.6 to 51.4 % is likelier",
        "MFU 56.5 % is likelier",
        (
            f"{PAGES}::test_the_chinese_page_has_the_fences_and_rows_of_the_english_one[docs/planner.md-docs/zh/planner.md]",
        ),
    ),
    Mutant(
        "text follows a table without a blank line and becomes a row",
        "docs/planner.md",
        "| +4.1 to +5.4 |\n\n**Within",
        "| +4.1 to +5.4 |\n**Within",
        (f"{PAGES}::test_a_blank_line_keeps_a_table_and_what_follows_apart[docs/planner.md]",),
    ),
    Mutant(
        "a page puts the planner a layer too low",
        "CONTRIBUTING.md",
        "    training | planner\n    evaluation\n    generate\n",
        "    training\n    evaluation | planner\n    generate\n",
        ("tests/docs/test_contributing.py::test_the_layers_of_contributing_are_those_that_are_held",),
    ),
    Mutant(
        "the picture of the packages lets loss stand above p2p",
        "docs/architecture.md",
        "| timers, gradient_reducer, gradients, loss  ",
        "| timers, gradient_reducer, gradients        ",
        ("tests/docs/test_contributing.py::test_the_layers_of_the_picture_are_those_that_are_held[tds]",),
    ),
    Mutant(
        "a call diagram names a file that is not there",
        "docs/architecture.md",
        "checkpoint/shard_file.py        a safetensors",
        "checkpoint/shard_files.py       a safetensors",
        ("tests/docs/test_contributing.py::test_paths_in_the_call_diagrams_are_there",),
    ),
    Mutant(
        "migration sends a former path to another module",
        "docs/migration.md",
        "| `tds.boundary` | `tds.p2p.boundary` |",
        "| `tds.boundary` | `tds.p2p.communicator` |",
        (f"{MIGRATION}::test_former_paths_are_all_that_are_forwarded_and_their_new_places_are_there[english]",),
    ),
    Mutant(
        "migration gives former names to other classes",
        "docs/zh/migration.md",
        "`ParamInit`, `LRScheduler`",
        "`LRScheduler`, `ParamInit`",
        (f"{MIGRATION}::test_former_names_are_all_that_packages_look_up[chinese]",),
    ),
    Mutant(
        "a row of reliability rests on a test that is not there",
        "tests/reliability/held_by.toml",
        "test_killed_rank_ends_all_others_with_4",
        "test_killed_rank_ends_all_others_with_5",
        ("tests/docs/test_reliability.py::test_every_row_has_tests_that_exist_and_none_rests_on_slow_ones_alone",),
    ),
    Mutant(
        "the ledger of experiments becomes a page of the site",
        "mkdocs.yml",
        "  /experiments.md\n",
        "  /experiment.md\n",
        (f"{SITE}::test_the_ledger_of_experiments_is_no_page_and_no_page_links_to_it",),
    ),
    Mutant(
        "the site forgets the style of wide tables",
        "mkdocs.yml",
        "extra_css: [assets/site.css]",
        "extra_css: []",
        (BUILD,),
    ),
    Mutant(
        "the reading order sends a reader to a file that no step runs",
        "docs/reading_order.md",
        "`tds/p2p/communicator.py`, `tds/p2p/boundary.py`, `tds/module.py` |",
        "`tds/p2p/communicator.py`, `tds/p2p/boundary.py`, `tds/plot.py` |",
        ("tests/docs/test_reading_order.py::test_the_files_and_lines_of_each_sitting_run_in_a_step",),
    ),
    Mutant(
        "a page has another step time than the ledger",
        "docs/zh/tuning.md",
        "| 3,335 | 2,995 |",
        "| 3,335 | 2,959 |",
        ("tests/docs/test_measured.py::test_the_steps_beside_others_are_rows_of_the_ledger[zh/tuning.md]",),
    ),
    Mutant(
        "the tutorial tells of another number of tokens",
        "docs/tutorial_corpus.md",
        "44,215 tokens in 72 documents",
        "44,251 tokens in 72 documents",
        ("tests/docs/test_tutorial.py::test_what_the_page_tells_of_the_corpus_is_what_its_tools_print",),
    ),
    Mutant(
        "the tutorial has a step without a command",
        "docs/tutorial_corpus.md",
        "    python tools/train_tokenizer.py",
        "`python tools/train_tokenizer.py",
        ("tests/docs/test_tutorial.py::test_every_step_has_something_to_run",),
    ),
    Mutant(
        "a test lies among those of another package",
        "tests/ops/test_positions.py",
        "from megatron.ops.positions import relative_buckets",
        "from megatron.tokenizer import relative_buckets",
        ("tests/test_layout.py::test_tests_lie_where_their_sources_lie",),
    ),
    Mutant(
        "the page of a model of one's own shows another code than the example",
        "docs/own_model.md",
        "        self.num_layers = len(of_layers)\n",
        "        self.num_layers = len(layers)\n",
        ("tests/examples/test_own_model.py::test_the_blocks_of_the_page_stand_in_the_example_in_their_order",),
    ),
)
