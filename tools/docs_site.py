"""Hooks of MkDocs for the site of docs/ (mkdocs.yml names this file; it is not run by itself).

| pages link to | on the site |
|---|---|
| files of the repository outside docs/, such as ../tds/README.md | copies under repository/, pages rendered |
| headings, Chinese ones too | anchors as GitHub makes them |
| the page in the other language | a line below the title |
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pymdownx.slugs import slugify

COPIES = "repository/"
FRONT = {"index.md": "zh/README.md", "zh/README.md": "index.md"}
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_config(config: Any) -> Any:
    """Give headings the anchors of GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to outside docs/, and what these link to."""
    root = Path(config.docs_dir).parent
    waiting = [f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md")]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for aim in sorted({aim for aim, _ in aims(page, (root / page).read_text(encoding="utf-8"))} - seen):
            if aim.startswith(("docs/", "..")) or not (root / aim).is_file():
                continue  # MkDocs itself warns of what is missing
            seen.add(aim)
            files.append(File.generated(config, COPIES + aim, abs_src_path=str(root / aim)))
            if aim.endswith(".md"):
                waiting.append(aim)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at their copies, and the page at its sibling."""
    uri = page.file.src_uri
    markdown = retarget(markdown, uri)
    other = sibling(uri)
    if uri.startswith(COPIES) or not files.get_file_from_path(other):
        return markdown
    link = posixpath.relpath(other, posixpath.dirname(uri) or ".")
    title, _, rest = markdown.partition("\n")
    return f"{title}\n\n[{'English' if uri.startswith('zh/') else '中文'}]({link})\n{rest}"


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Say the language of a page to browsers."""
    return output.replace('lang="en"', 'lang="zh"', 1) if page.file.src_uri.startswith("zh/") else output


def sibling(uri: str) -> str:
    """Return where the page in the other language is, if there is one."""
    return FRONT.get(uri) or (uri.removeprefix("zh/") if uri.startswith("zh/") else f"zh/{uri}")


def aims(page: str, markdown: str) -> Iterator[tuple[str, str]]:
    """Yield (path in the repository, link as written) of each link of a page to a file."""
    for _, target, _ in _LINK.findall(markdown):
        name = target.partition("#")[0]
        if name and not re.match(r"[a-z]+:", name):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(page), name)), target


def retarget(markdown: str, uri: str) -> str:
    """Return the page with links to files outside docs/, or from there into it, as the site has them."""
    page = uri.removeprefix(COPIES) if uri.startswith(COPIES) else f"docs/{uri}"
    places = {}
    for aim, target in aims(page, markdown):
        place = aim.removeprefix("docs/") if aim.startswith("docs/") else COPIES + aim
        anchor = target[len(target.partition("#")[0]) :]
        places[target] = posixpath.relpath(place, posixpath.dirname(uri) or ".") + anchor
    return _LINK.sub(lambda match: match[1] + places.get(match[2], match[2]) + match[3], markdown)
