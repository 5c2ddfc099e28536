"""The site of docs/: it builds without a warning, every page is in it, and every page has its sibling or a reason."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from tools import docs

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EXCLUDED_PAGES = set(SETTINGS["exclude_docs"].replace("/", "").split())
PAGES = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - EXCLUDED_PAGES


def iter_nav_pages(entry: Any) -> Iterator[str]:
    """Yield the pages of the navigation."""
    if isinstance(entry, str):
        yield entry
    for child in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from iter_nav_pages(child)


def test_every_page_is_in_navigation_once() -> None:
    named = list(iter_nav_pages(SETTINGS["nav"]))
    assert sorted(named) == sorted(PAGES)


def test_experiments_ledger_is_excluded_and_not_linked() -> None:
    assert sorted(EXCLUDED_PAGES) == ["experiments.md"] and (ROOT / "docs" / "experiments.md").is_file()
    linking = [page for page in sorted(PAGES) if "experiments.md)" in (ROOT / "docs" / page).read_text("utf-8")]
    assert linking == []


def test_every_page_has_chinese_version_or_reason() -> None:
    reasons = SETTINGS["extra"]["english_only"]
    english = {page for page in PAGES if not page.startswith("zh/")}
    untranslated = {page for page in english if f"zh/{page}" not in PAGES}
    assert untranslated == set(reasons) and all(reasons.values())
    assert {page for page in PAGES - english if page.removeprefix("zh/") not in english} == {"zh/README.md"}


@pytest.mark.parametrize(
    "page, link, expected",
    [
        ("pipelines.md", "../tds/README.md", "repository/tds/README.md"),
        ("zh/t5.md", "../glossary.md#t5", "../glossary.md#t5"),
        ("zh/t5.md", "../../LICENSE", "../repository/LICENSE"),
        ("repository/README.md", "docs/t5.md#shapes", "../t5.md#shapes"),
        ("repository/examples/mpt/README.md", "../llama/README.md", "../llama/README.md"),
        ("index.md", "https://example.org/x.md", "https://example.org/x.md"),
        ("index.md", "#here", "#here"),
    ],
)
def test_retarget_points_links_to_copies(page: str, link: str, expected: str) -> None:
    assert docs.rewrite_links(f"see [this]({link}), and", page) == f"see [this]({expected}), and"


def build_site(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(folder / "mkdocs.yml"), "-d", str(site)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    result = build_site(ROOT, folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_site_builds_without_warnings_or_remote_resources(site: Path) -> None:
    pages = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    assert {"index.html", "zh/index.html", "zh/t5.html", "repository/tds/index.html"} <= pages
    assert not any("experiments" in page for page in pages)
    english, chinese = ((site / name).read_text(encoding="utf-8") for name in ("pipelines.html", "zh/pipelines.html"))
    assert 'href="zh/pipelines.html">中文' in english and 'href="../pipelines.html">English' in chinese
    assert '<html lang="zh"' in chinese
    assert 'href="assets/site.css"' in english, "without it wide tables lose their last columns"
    assert 'src="assets/iframe-worker.js"' in english and 'src="../assets/iframe-worker.js"' in chinese
    fetched = re.findall(r'<(?:link|script|img)[^>]*(?:href|src)="(https?:[^"]*)"', english + chinese)
    assert not fetched


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no chromium on the path: apt-get install chromium")
@pytest.mark.parametrize("query", ["index.html?q=packing", "zh/index.html?q=流水线"])
def test_search_finds_pages_from_disk(query: str, site: Path, tmp_path: Path) -> None:
    page, _, word = query.partition("?q=")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path}"]
    url = f"{(site / page).as_uri()}?q={quote(word)}"
    command = [str(CHROMIUM), *flags, "--virtual-time-budget=30000", "--dump-dom", url]
    page_text = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
    matches = re.search(r'class="md-search-result__meta">(\d+) matching documents', page_text)
    assert matches is not None and int(matches[1]) > 3


def test_dead_links_fail_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "theme").mkdir()
    (tmp_path / "theme" / "main.html").write_text("{{ page.content }}")
    (tmp_path / "docs" / "t5.md").write_text("# T5\n")
    dead = "[a](gone-page.md) [b](t5.md#gone-heading) ![c](pictures/gone-picture.png)"
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n{dead}\n\n[there](t5.md#t5)\n")
    settings = {key: SETTINGS[key] for key in ("site_name", "validation", "use_directory_urls")}
    settings |= {"hooks": [str(ROOT / "tools" / "docs.py")], "theme": {"name": None, "custom_dir": "theme"}}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump({**settings, "plugins": [], "nav": ["index.md", "t5.md"]}))
    result = build_site(tmp_path, tmp_path / "site")
    assert result.returncode != 0
    warnings = (
        result.stderr.count("WARNING"),
        [name for name in ("page", "heading", "picture") if f"gone-{name}" in result.stderr],
    )
    assert warnings == (3, ["page", "heading", "picture"])
