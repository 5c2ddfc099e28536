"""Mistakes in the pages and in what makes a site of them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SITE = "tests/docs/test_site.py"
MIGRATION = "tests/docs/test_migration.py"
TROUBLE = "tests/docs/test_troubleshooting.py::test_each_message_is_in_the_source[english]"
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
        "tools/docs_site.py",
        "else COPIES + aim",
        "else aim",
        (f"{SITE}::test_links_out_of_the_pages_and_into_them_are_pointed_at_copies",),
    ),
    Mutant(
        "anchors of copied links get lost",
        "tools/docs_site.py",
        'posixpath.dirname(uri) or ".") + anchor',
        'posixpath.dirname(uri) or ".")',
        (f"{SITE}::test_links_out_of_the_pages_and_into_them_are_pointed_at_copies",),
    ),
    Mutant(
        "a page of docs is not linked to its sibling",
        "tools/docs_site.py",
        '    return FRONT.get(uri) or (uri.removeprefix("zh/")',
        '    return FRONT.get(uri) or (uri.removeprefix("zh-/")',
        (BUILD,),
    ),
    Mutant(
        "migration calls a refused flag the same",
        "docs/migration.md",
        "| `--recompute-method` | refused |",
        "| `--recompute-method` | the same |",
        (f"{MIGRATION}::test_each_flag_is_what_the_command_line_makes_of_it",),
    ),
    Mutant(
        "migration names another flag in place of a refused one",
        "docs/migration.md",
        "| refused | `--eval-only` |",
        "| refused | `--finetune` |",
        (f"{MIGRATION}::test_what_a_refused_flag_is_replaced_by_is_what_its_error_says",),
    ),
    Mutant(
        "an error is reworded and the page of messages is not",
        "megatron/checkpoint/opening.py",
        "the newest checkpoint must verify, none older",
        "the newest checkpoint has to verify, none older",
        (TROUBLE,),
    ),
    Mutant(
        "the picture of ZeRO cuts gradients from stage 1 on",
        "tools/docs_pictures.py",
        '"gradients": (4, 2)',
        '"gradients": (4, 1)',
        ("tests/docs/test_pictures.py::test_the_bytes_of_the_picture_are_those_of_the_table_of_memory",),
    ),
)
