"""Draw the pictures of docs/parallelism.md and docs/pipelines.md, and build the site of docs/ with MkDocs.

    python tools/docs.py                    # pictures, into docs/pictures
    python tools/docs.py --out FOLDER --only grid layer
    mkdocs serve                            # the site; mkdocs.yml names this file for its hooks

| picture | contents | source |
|---|---|---|
| grid.png | 8 ranks as pipe x data x tensor, and which ranks communicate | megatron/mpu/topology.py |
| layer.png | the shards of a layer on each of two tensor ranks | the shapes of megatron/mpu/layers.py |
| zero.png | bytes of a parameter by ZeRO stage | the table of docs/memory.md |
| 1f1b.png, zb-h1.png, interleaved.png, zb-v.png | schedules of 4 stages and 8 micro-batches | tools/draw_schedule.py |

This tool draws neither coord_check.png (see tools/coord_check.py) nor report.png.

report.png (docs/monitoring.md) shows the output of tools/report.py for two runs of ``GPUS_PER_NODE=2 bash run_gpt2.sh
--train-iters 60 --log-interval 2 --eval-interval 20 --log-layer-norms``, called gpt2-cosine (pp_size=2 mp_size=1,
--save-interval 20 --async-save --profile 5-6 --pipeline-trace) and gpt2-linear (pp_size=1 mp_size=2, --save-interval 30
--lr 1e-3 --lr-decay-style linear, stopped by --exit-interval 36 and resumed), by Chromium with ``--headless
--hide-scrollbars --virtual-time-budget=3000 --window-size=1400,2250 --screenshot=FILE``. Take a new screenshot when the
report changes.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.mpu.topology import Topology, chunk_indices  # noqa: E402

GRID = Topology(pipe=2, data=2, tensor=2)
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52")
SCHEDULES = ("1f1b", "zb-h1", "interleaved", "zb-v")
NUM_REPLICAS = 8
BYTES_PER_PARAMETER = {"weights": (2, 3), "gradients": (4, 2), "main params and moments": (12, 1)}
"""Type of tensor -> its bytes per parameter with 16-bit weights and AdamW, and the first ZeRO stage that shards it."""
NUM_CONTEXT_RANKS = 4
CONTEXT_NOTE = "each rank has two chunks;\nthe sum of their areas is\nequal on all ranks"
LAYER_NOTE = (
    "Grey tensors are replicated on both ranks, and so are norms, residuals and dropout.\n"
    "--sequence-parallel: grey is [s/2, b, h], all-gather before each half, reduce-scatter instead of all-reduce."
)


def main() -> int:
    """Draw the requested pictures."""
    flags = parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    for name in flags.only:
        PICTURES[name](flags.out / f"{name}.png")
    return 0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", help="folder (default: docs/pictures)")
    parser.add_argument("--only", nargs="+", choices=sorted(PICTURES), default=sorted(PICTURES), help="which pictures")
    return parser.parse_args(argv)


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """Return an empty figure, with sizes in inches, and its axes."""
    # matplotlib is imported in functions, because MkDocs loads this file, too, and does not need it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


def box(
    axes: Any, corner: tuple[float, float], size: tuple[float, float], colour: str, text: str, **style: Any
) -> None:
    """Draw a rounded box with a text in its middle."""
    from matplotlib.patches import FancyBboxPatch

    patch = FancyBboxPatch(corner, *size, boxstyle="round,pad=0,rounding_size=0.08", facecolor=colour, **style)
    axes.add_patch(patch)
    axes.text(corner[0] + size[0] / 2, corner[1] + size[1] / 2, text, ha="center", va="center", fontsize=9)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str, is_double: bool = True) -> None:
    style = "<->" if is_double else "->"
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": style, "color": colour, "lw": 1.6})


def draw_grid(path: Path) -> None:
    """Draw the ranks of GRID: stages in columns, replicas in rows, tensor ranks next to each other."""
    figure, axes = canvas(8, 4.2)
    positions = {}
    for rank in range(GRID.world_size):
        coordinate = GRID.coordinate(rank)
        x, y = 4.2 * coordinate.pipe + 1.7 * coordinate.tensor, -1.9 * coordinate.data
        positions[rank] = (x, y)
        colour = COLOURS[coordinate.pipe] + "55"
        box(
            axes, (x, y), (1.2, 1.0), colour, f"rank {rank}\np{coordinate.pipe} d{coordinate.data} t{coordinate.tensor}"
        )
    for axis, colour, (dx, dy) in (("tensor", COLOURS[3], (1.2, 0.5)), ("data", COLOURS[2], (0.6, 0.0))):
        for first, second in GRID.groups(axis):
            (x, y), (u, v) = positions[first], positions[second]
            arrow(
                axes,
                (x + dx, y + dy),
                (u if axis == "tensor" else u + 0.6, v + (0.5 if axis == "tensor" else 1.0)),
                colour,
            )
    for first, second in GRID.groups("pipe"):
        (x, y), (u, v) = positions[first], positions[second]
        height = 1.0 if GRID.coordinate(first).tensor == 0 else 0.0
        arc = {
            "arrowstyle": "<->",
            "color": "#555555",
            "connectionstyle": f"arc3,rad={-0.18 if height else 0.18}",
            "lw": 1.4,
        }
        axes.annotate("", xy=(u + 0.6, v + height), xytext=(x + 0.6, y + height), arrowprops=arc)
    for stage in range(GRID.pipe):
        axes.text(4.2 * stage + 1.45, 1.75, f"stage {stage}: the same layers", ha="center", fontsize=10)
    for replica in range(GRID.data):
        axes.text(-0.25, -1.9 * replica + 0.5, f"replica {replica}", ha="right", va="center", fontsize=10)
    legend = (("tensor: all-reduce in every layer", COLOURS[3]), ("data: gradients, once a step", COLOURS[2]),
            ("pipe: activations, their gradients", "#555555"))  # fmt: skip
    for i, (text, colour) in enumerate(legend):
        axes.text(-1.5 + 3.3 * i, -2.9, text, color=colour, fontsize=9)
    finish(figure, axes, (-1.5, 7.6), (-3.1, 2.1), path)


def draw_layer(path: Path) -> None:
    """Draw a transformer layer sharded over two tensor ranks."""
    figure, axes = canvas(9, 3.6)
    columns = (
        ("x\n[s, b, h]", False), ("q, k, v\n[h, 3h/2]\ncolumns", True), ("attention\nof a/2\nheads", True),
        ("dense\n[h/2, h]\nrows", True), ("+", False), ("up\n[h, f/2]\ncolumns", True), ("down\n[f/2, h]\nrows", True),
        ("+", False),
    )  # fmt: skip
    x = 0.0
    for text, is_sharded in columns:
        width = 1.0 if text == "+" else 1.5 if is_sharded else 1.1
        if not is_sharded:
            label = "all-\nreduce" if text == "+" else text
            box(axes, (x, -1.4), (width, 2.6), "#dddddd", label, edgecolor="#888888")
        for rank in range(2 * is_sharded):
            box(axes, (x, 0.1 - 1.5 * rank), (width, 1.1), COLOURS[rank] + "55", text, edgecolor=COLOURS[rank])
        x += width + 0.35
    for rank in range(2):
        axes.text(-0.2, 0.65 - 1.5 * rank, f"tensor rank {rank}", ha="right", va="center", fontsize=10)
    axes.text(0, -2.0, LAYER_NOTE, fontsize=9)
    finish(figure, axes, (-1.7, x), (-2.1, 1.4), path)


def draw_context(path: Path) -> None:
    """Draw for each chunk of queries the keys to which it attends, in the colour of its context-parallel rank."""
    figure, axes = canvas(6.6, 4.0)
    num_chunks = 2 * NUM_CONTEXT_RANKS
    for rank in range(NUM_CONTEXT_RANKS):
        for query in chunk_indices(rank, NUM_CONTEXT_RANKS):
            for key in range(query + 1):
                corners = [(key, -query), (key + 1, -query), (key + 1, -query - 1), (key, -query - 1)]
                shape = corners if key < query else [corners[0], corners[2], corners[3]]
                axes.add_patch(_polygon(shape, COLOURS[rank]))
            axes.text(-0.2, -query - 0.5, f"chunk {query}: rank {rank}", ha="right", va="center", fontsize=9)
    axes.text(num_chunks / 2, 0.35, "keys, gathered from all ranks", ha="center", fontsize=10)
    axes.text(num_chunks + 0.3, -num_chunks / 2, CONTEXT_NOTE, va="center", fontsize=9)
    finish(figure, axes, (-3.2, num_chunks + 5.0), (-num_chunks - 0.2, 1.0), path)


def _polygon(corners: list[tuple[int, int]], colour: str) -> Any:
    from matplotlib.patches import Polygon

    return Polygon(corners, closed=True, facecolor=colour + "aa", edgecolor="white")


def bytes_per_replica(component: str, stage: int, num_replicas: int) -> float:
    """Return the bytes of a parameter that one replica stores at a ZeRO stage."""
    unsharded, first_sharded_stage = BYTES_PER_PARAMETER[component]
    return unsharded / num_replicas if stage >= first_sharded_stage else unsharded


def draw_zero(path: Path) -> None:
    """Draw the bytes of one parameter by ZeRO stage."""
    figure, axes = canvas(7, 2.8)
    for stage in range(4):
        left = 0.0
        for component, colour in zip(BYTES_PER_PARAMETER, COLOURS, strict=False):
            width = bytes_per_replica(component, stage, NUM_REPLICAS)
            axes.barh(3 - stage, width, left=left, color=colour, label=component if stage == 0 else None)
            left += width
        axes.text(left + 0.2, 3 - stage, f"{left:g}", va="center", fontsize=9)
    axes.set_yticks(range(4), [f"ZeRO {stage}" for stage in (3, 2, 1, 0)])
    axes.set_xlabel(f"bytes of a parameter on each of {NUM_REPLICAS} replicas, AdamW, bf16 or fp16")
    axes.set_xlim(0, 20)
    axes.legend(loc="lower right", fontsize=9)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def finish(figure: Any, axes: Any, x_limits: tuple[float, float], y_limits: tuple[float, float], path: Path) -> None:
    """Set the limits of the axes and write the file."""
    axes.set_xlim(*x_limits)
    axes.set_ylim(*y_limits)
    axes.axis("off")
    figure.savefig(path, dpi=110, bbox_inches="tight")


def draw_schedule(path: Path) -> None:
    """Draw the schedule whose name is the stem of ``path``, with tools/draw_schedule.py."""
    chunks = ["--chunks", "2"] if path.stem == "interleaved" else []
    schedule_flags = ["--schedule", path.stem, "--stages", "4", "--micro-batches", "8", *chunks, "--out", str(path)]
    command = [sys.executable, str(ROOT / "tools" / "draw_schedule.py"), *schedule_flags]
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(code)  # draw_schedule.py has printed the error


PICTURES = {
    "grid": draw_grid, "layer": draw_layer, "context": draw_context, "zero": draw_zero,
    **dict.fromkeys(SCHEDULES, draw_schedule),
}  # fmt: skip

# Hooks of MkDocs.
#
# | link in a page | on the site |
# |---|---|
# | files outside docs/, such as ../tds/README.md | copies in repository/; Markdown files become pages |
# | headings, including Chinese ones | the same anchors as on GitHub |
# | the page in the other language | a line below the title |

COPIED_PREFIX = "repository/"
FRONT_PAGES = {"index.md": "zh/README.md", "zh/README.md": "index.md"}
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_config(config: Any) -> Any:
    """Use GitHub's anchors for headings."""
    from pymdownx.slugs import slugify

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/ to which pages link, directly or through other added pages."""
    from mkdocs.structure.files import File

    root = Path(config.docs_dir).parent
    pending = [f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md")]
    added = set(pending)
    while pending:
        page = pending.pop()
        for target in sorted(
            {target for target, _ in linked_files(page, (root / page).read_text(encoding="utf-8"))} - added
        ):
            if target.startswith(("docs/", "..")) or not (root / target).is_file():
                continue  # MkDocs warns about missing files itself
            added.add(target)
            files.append(File.generated(config, COPIED_PREFIX + target, abs_src_path=str(root / target)))
            if target.endswith(".md"):
                pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Redirect links to the copies of files, and link the page to its translation."""
    uri = page.file.src_uri
    markdown = rewrite_links(markdown, uri)
    translation = translation_path(uri)
    if uri.startswith(COPIED_PREFIX) or not files.get_file_from_path(translation):
        return markdown
    link = posixpath.relpath(translation, posixpath.dirname(uri) or ".")
    title, _, body = markdown.partition("\n")
    return f"{title}\n\n[{'English' if uri.startswith('zh/') else '中文'}]({link})\n{body}"


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Set the ``lang`` attribute of Chinese pages."""
    return output.replace('lang="en"', 'lang="zh"', 1) if page.file.src_uri.startswith("zh/") else output


def translation_path(uri: str) -> str:
    """Return the path of the page in the other language, whether it exists or not."""
    return FRONT_PAGES.get(uri) or (uri.removeprefix("zh/") if uri.startswith("zh/") else f"zh/{uri}")


def linked_files(page: str, markdown: str) -> Iterator[tuple[str, str]]:
    """Yield (path in the repository, link as written) for each link of a page to a file."""
    for _, target, _ in _LINK.findall(markdown):
        name = target.partition("#")[0]
        if name and not re.match(r"[a-z]+:", name):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(page), name)), target


def rewrite_links(markdown: str, uri: str) -> str:
    """Replace links between docs/ and files outside docs/ by links to their paths on the site."""
    page = uri.removeprefix(COPIED_PREFIX) if uri.startswith(COPIED_PREFIX) else f"docs/{uri}"
    new_links = {}
    for linked_path, target in linked_files(page, markdown):
        site_path = (
            linked_path.removeprefix("docs/") if linked_path.startswith("docs/") else COPIED_PREFIX + linked_path
        )
        anchor = target[len(target.partition("#")[0]) :]
        new_links[target] = posixpath.relpath(site_path, posixpath.dirname(uri) or ".") + anchor
    return _LINK.sub(lambda match: match[1] + new_links.get(match[2], match[2]) + match[3], markdown)


if __name__ == "__main__":
    sys.exit(main())
