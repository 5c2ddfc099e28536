"""``tools/report.py``: one page of any runs, which fetches nothing and lets nothing of a run act."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.costs.memory import Memory
from tests.tools.made_runs import make_record, make_run
from tests.tools.test_draw_schedule import write_trace
from tools import report
from tools.report import (
    MEMORY_COLUMNS,
    MEMORY_COMPONENTS,
    RUN_COLUMNS,
    compare_settings,
    describe_state,
    memory_table,
    render_page,
    stage_table,
    summary_cells,
    to_script_json,
)
from tools.report_parts.runs import CHARTS, RunFolder, interpolate, names_of, read_run, thin_records, to_columns
from tools.report_parts.words import ZH, bilingual

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the path: apt-get install chromium")


EXPECTED_TEXTS = (
    "My runs", "one", "two", "gpt2, 4 layers, hidden 32", "2 = 2 x 1 x 1", "3.2500", "layers 3-6 of 7", "1.50 GiB",
    "400.0 ms", "20.0 %", "python pretrain_gpt2.py --lr 1e-3", "torch 2.13.0", "480 samples read",
)  # fmt: skip
"""What stands on the page of two made-up runs."""


class PageReader(HTMLParser):
    """Keeps tags with their attributes, and the text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.script = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.script += data
        elif not self.open or self.open[-1] != "style":
            self.words.append(data)

    def data(self) -> Any:
        return json.JSONDecoder().raw_decode(self.script)[0]


def run_report(monkeypatch: pytest.MonkeyPatch, *args: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, args)])
    return report.main()


def read_page(*folders: Path, **options: Any) -> PageReader:
    """Return the page of these runs, read."""
    runs = [read_run(path, name) for path, name in zip(folders, names_of(list(folders)), strict=True)]
    reader = PageReader(render_page(runs, "Runs", **options))
    assert not reader.open
    return reader


def test_page_is_complete_and_self_contained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_run, second_run = (
        make_run(tmp_path / "runs" / "one"),
        make_run(tmp_path / "runs" / "two", run=1, hidden_size=64),
    )
    out = tmp_path / "page.html"
    assert run_report(monkeypatch, first_run, second_run, "-o", out, "--title", "My runs") == 0
    text = out.read_text()
    assert not re.search(r"https?://|@import|url\(", text)
    reader = PageReader(text)
    for tag, attributes in reader.tags:
        assert tag not in ("iframe", "object", "embed", "img", "base")
        assert tag != "script" or "src" not in attributes
        assert (attributes.get("href") or "data:,").startswith("data:")
        assert not [name for name in attributes if name.startswith("on")]
    page_text = " ".join(reader.words)
    for expected in EXPECTED_TEXTS:
        assert expected in page_text, expected
    data = reader.data()
    assert [run["name"] for run in data["runs"]] == ["one", "two"]
    charts = {chart["id"]: chart for chart in data["charts"]}
    assert set(charts) == set(
        "loss loss-tokens valid-loss valid-perplexity learning-rate grad-norm tokens-per-s mfu bubble memory data-wait "
        "work layer-norms corpora".split()
    )
    assert (charts["loss"]["x"], charts["loss-tokens"]["x"]) == ("step", "tokens")
    assert charts["memory"]["keys"] == ["memory_bytes/stage 0", "memory_bytes/stage 1"]
    assert data["runs"][0]["columns"]["hours"][-1] == pytest.approx(60 / 3600, rel=1e-4)
    assert data["runs"][0]["points"]["valid"] == [{"step": 30, "loss": 4.5, "tokens": 30720, "hours": 0.00833333}]
    marks = {(mark["kind"], mark["step"]): mark["tokens"] for mark in data["runs"][0]["marks"]}
    assert marks == {("save", 30): 30720, ("start", 20): 20480}


def test_run_text_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)<img onerror=x>"
    folder = make_run(tmp_path / evil, activation="</script><script>alert(2)</script>", note="{{data}}")
    (folder / "command.txt").write_text("python x </pre></script><script>alert(3)</script> 'a' \"b\" &amp;\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(make_record(61, layer_norms={"</script><b>": 1.0})) + "\n")
    reader = read_page(folder)
    assert [tag for tag, _ in reader.tags].count("script") == 2
    assert not [tag for tag, _ in reader.tags if tag in ("img", "b")]
    page_text = " ".join(reader.words)
    assert evil in page_text and "alert(3)</script> 'a' \"b\" &amp;" in page_text and '"{{data}}"' in page_text
    assert "layer_norms/</script><b>" in reader.data()["runs"][0]["columns"]
    assert "<" not in to_script_json({"a": "</script><!--"})


@pytest.mark.parametrize("name", ["half", "crashed", "empty", "damaged", "old"])
def test_incomplete_runs_have_pages(name: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / name)
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    if name == "half":
        metrics.write_text("\n".join(lines[:30]) + '\n{"kind":"train","st')
    elif name == "crashed":
        metrics.write_text("\n".join(lines[:10]) + "\n" + json.dumps(make_record(11, loss=None, grad_norm=None)))
    elif name == "empty":
        metrics.unlink()
    elif name == "damaged":
        metrics.write_text('[1]\n{"step": 1}\n{"kind": "train", "step": "x"}\nnull\n' + lines[0])
        for file in ("config.json", "stages.json", "versions.json", "starts.jsonl"):
            (folder / file).write_text('{"a":')
        (folder / "stability.jsonl").write_text('{"a":')
    else:
        for file in ("starts.jsonl", "stages.json"):
            (folder / file).unlink()
        short_record = {"kind": "train", "step": 60, "loss": 2.5, "samples": 480, "step_s": 0.5, "tokens_per_s": 9.0}
        metrics.write_text(json.dumps(short_record) + "\n")
    expected_by_name = {
        "half": ("at step 30 of 60", "", 30),
        "crashed": ("non-finite loss at step 11", "", 11),
        "empty": ("no records", "no records yet", 0),
        "damaged": ("at step 1", "config.json cannot be read", 1),
        "old": ("finished", "", 1),
    }
    run = read_run(folder, name)
    expected, note, num_points = expected_by_name[name]
    text, *values = describe_state(run)
    assert text.format(*values) == expected and note in " ".join(run.notes)
    reader = read_page(folder)
    assert len(reader.data()["runs"][0]["columns"].get("loss", [])) == num_points
    if name == "old":
        assert reader.data()["runs"][0]["columns"]["tokens"] == [480 * 128]
        assert dict(zip(RUN_COLUMNS[1:], summary_cells(run), strict=True))["time"] == "0:30"


def test_run_state_includes_last_checkpoint(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()[:30]
    saves = [json.dumps({"kind": "save", "step": 35}), json.dumps({"kind": "save", "step": 37, "failed": "disk full"})]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, *saves, ""]))
    text, *values = describe_state(read_run(folder, "run"))
    assert text.format(*values) == "at step 35 of 60"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"train_samples": 484}, "finished"),  # 480 are consumed, by steps of 8
        ({"train_samples": 488}, "at sample 480 of 488"),
        ({"train_tokens": 480 * 128}, "finished"),
        ({"train_tokens": 480 * 128 + 1}, "at sample 480 of 481"),
        ({"train_samples": 960, "train_tokens": 700 * 128}, "at sample 480 of 700"),
    ],
)
def test_run_state_respects_sample_and_token_limits(limits: dict[str, int], expected: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    config["batch"] |= {"train_iters": 99, "seq_length": 128, **limits}
    (folder / "config.json").write_text(json.dumps(config))
    text, *values = describe_state(read_run(folder, "run"))
    assert text.format(*values) == expected


def test_damaged_run_does_not_prevent_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage = '{"step": "x"}\n[1]\n"step"\n{"step": true}\n'
    odd = make_run(tmp_path / "all" / "odd", activation="\ud800")
    (odd / "stability.jsonl").write_text(damage)
    (odd / "starts.jsonl").write_text(damage)
    broken, unread, good = (make_run(tmp_path / "all" / name) for name in ("broken", "unread", "good"))
    plain_read, plain_facts = report.read_run, summary_cells

    def failing_read(path: Path, name: str) -> RunFolder:
        if path == unread:
            raise PermissionError("not yours")
        return plain_read(path, name)

    def failing_facts(run: RunFolder) -> list[str]:
        return [][1] if run.path == broken and run.records else plain_facts(run)

    monkeypatch.setattr(report, "read_run", failing_read)
    monkeypatch.setattr("tools.report.summary_cells", failing_facts)
    out = tmp_path / "page.html"
    assert run_report(monkeypatch, tmp_path / "all", "-o", out) == 0
    assert "4 runs" in capsys.readouterr().out
    reader = PageReader(out.read_text(encoding="utf-8"))
    drawn = {run["name"]: len(run["columns"].get("loss", [])) for run in reader.data()["runs"]}
    assert drawn == {"broken": 0, "good": 60, "odd": 60, "unread": 0}
    page_text = " ".join(reader.words)
    assert (
        "broken: the run is damaged and was skipped (IndexError: " in page_text
        and "unread: the run is damaged" in page_text
    )
    assert read_run(odd, "odd").starts == read_run(odd, "odd").journal == []


def test_script_selectors_exist_in_page(tmp_path: Path) -> None:
    """What the slow test sees in a browser, as far as it goes without one."""
    reader = read_page(make_run(tmp_path / "one"), make_run(tmp_path / "two", run=1))
    ids = {attributes.get("id") for _, attributes in reader.tags}
    used_ids = set(re.findall(r'getElementById\("([\w-]+)"\)', reader.script + INTERACTION_SCRIPT))
    assert {"data", "charts", "theme"} <= used_ids <= ids
    classes = {(tag, name) for tag, attributes in reader.tags for name in (attributes.get("class") or "").split()}
    selected = set(re.findall(r'querySelector(?:All)?\("(\w+)\.([\w-]+)', reader.script + INTERACTION_SCRIPT))
    assert {("table", "settings"), ("button", "all-settings"), ("i", "swatch")} <= selected <= classes


def test_thinned_records_keep_spikes(tmp_path: Path) -> None:
    records = [{"kind": "train", "step": step, "loss": 2.0, "grad_norm": 1.0} for step in range(1, 6001)]
    records[1234]["loss"], records[2345]["grad_norm"] = 9.0, 70.0
    reader = thin_records(records, 1000)
    assert 300 < len(reader) <= 1000 and [reader[0]["step"], reader[-1]["step"]] == [1, 6000]
    assert {1235, 2346} <= {row["step"] for row in reader}
    assert [row["step"] for row in reader] == sorted(row["step"] for row in reader)
    assert thin_records(records[:1000], 1000) == records[:1000]


def test_page_supports_twenty_runs(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"run-{idx}", 60, idx, hidden_size=idx) for idx in range(20)]
    reader = read_page(*folders, max_points=15)
    assert len(reader.data()["runs"]) == 20
    assert sum(1 for tag, attributes in reader.tags if tag == "input" and "data-run" in attributes) == 20
    assert len(reader.script) < 300_000


def test_columns_mark_missing_values_and_interpolate() -> None:
    rows = [{"step": 1, "loss": 1.23456789}, {"step": 3, "loss": float("nan"), "more": {"a": 2}}, {"step": 5}]
    reader = to_columns(rows)
    assert reader == {"step": [1, 3, 5], "loss": [1.23457, None, None], "more/a": [None, 2, None]}
    assert [interpolate([1, 3, 5], [10, 30, None], step) for step in (0, 1, 2, 3, 9)] == [10, 10, 20, 30, 30]
    assert interpolate([], [], 3) is None


def test_compared_marks_different_settings(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / str(size), hidden_size=size), str(size)) for size in (32, 64)]
    rows = {name: (values, differs) for name, values, differs in compare_settings(runs)}
    assert rows["model.hidden_size"] == (["32", "64"], True)
    assert rows["model.num_layers"] == (["4", "4"], False)
    assert [name for name, (_, differs) in rows.items() if differs] == ["model.hidden_size"]
    assert rows["version.torch"] == (["2.13.0", "2.13.0"], False)


def test_run_names_are_shortest_unique_paths() -> None:
    assert names_of([Path("/a/x"), Path("/b/y")]) == ["x", "y"]
    assert names_of([Path("/a/x"), Path("/b/x")]) == ["a/x", "b/x"]
    assert names_of([Path("/a/x")]) == ["x"]


def test_stage_idle_time_is_step_minus_work(tmp_path: Path) -> None:
    text = str(stage_table(read_run(make_run(tmp_path / "run"), "run")))
    assert [f"{share} %" in text for share in ("20.0", "40.0")] == [True, True]  # 0.4 and 0.3 of 0.5 s
    assert stage_table(read_run(tmp_path, "none")) is None


def test_page_shows_pipeline_and_slowest_operators(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    write_trace(folder / "trace")
    config = json.loads((folder / "config.json").read_text())
    config["parallel"]["pipeline_trace"] = "run/trace"  # from where the run was started
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "profile").mkdir()
    operators = [{"name": "aten::mm<float>", "calls": 8, "host_us": 6000.0, "device_us": 0.0}]
    top = {"steps": 2, "ranks": 2, "operators": operators}
    (folder / "profile" / "top.json").write_text(json.dumps(top))
    reader = read_page(folder)
    boxes = [attributes["class"] for tag, attributes in reader.tags if tag == "rect"]
    assert boxes.count("box Forward") == 2 * 2 * 4  # measured and simulated, two stages, four micro-batches
    page_text = " ".join(reader.words)
    assert "zb-h1, step 3, 4 micro-batches" in page_text and "aten::mm<float>" in page_text and "1.500" in page_text
    (folder / "trace" / "trace-rank0.json").write_text("{")
    assert "The trace cannot be drawn" in " ".join(read_page(folder).words)


@pytest.mark.parametrize(("args", "folder"), [(["all"], "all"), (["all/a"], "all/a"), (["all/a", "all/b"], "all")])
def test_report_is_written_to_reported_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], folder: str
) -> None:
    make_run(tmp_path / "all" / "a"), make_run(tmp_path / "all" / "b")
    monkeypatch.chdir(tmp_path)
    assert run_report(monkeypatch, *args) == 0
    assert [str(page.parent.relative_to(tmp_path)) for page in tmp_path.rglob("report.html")] == [folder]
    assert f"{folder}/report.html: " in capsys.readouterr().out


def test_evaluations_do_not_change_run_state(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    values = {"loss": 3.75, "perplexity": 42.52, "losses": {"a": 3.5}}
    notes = {"checkpoint": "c/<40>", "config": {"batch": {"train_iters": 5}}}
    reader = {"kind": "test", "step": 40, **values, **notes}
    (folder / "evaluations.jsonl").write_text(json.dumps(reader) + "\n[1]\n")
    run = read_run(folder, "run")
    cells = dict(zip(RUN_COLUMNS[1:], summary_cells(run), strict=True))
    assert (cells["state"], cells["test"], run.setting("batch", "train_iters")) == (bilingual("finished"), "3.2500", 60)
    page_text = " ".join(read_page(folder).words)
    assert "Evaluations" in page_text and "c/<40>" in page_text and "3.7500" in page_text and "a 3.5000" in page_text
    for name in ("metrics.jsonl", "config.json"):
        (folder / name).unlink()
    evaluation_only = read_run(folder, "run")
    assert (
        describe_state(evaluation_only),
        summary_cells(evaluation_only)[6],
        evaluation_only.setting("batch", "train_iters"),
    ) == (("evaluated",), "3.7500", 5)


def test_page_shows_process_memory_before_model(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    path = folder / "stages.json"
    path.write_text(json.dumps([{**stage, "before_bytes": 300 << 20} for stage in json.loads(path.read_text())]))
    page_text = " ".join(read_page(folder).words)
    assert "before model build" in page_text and "300.00 MiB" in page_text and "(Python, torch, libraries)" in page_text


def test_memory_table_shows_estimate_minus_measurement(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    path = folder / "stages.json"
    path.write_text(json.dumps([{**stage, "before_bytes": 300 << 20} for stage in json.loads(path.read_text())]))
    text = str(memory_table(read_run(folder, "run")))
    rows = [re.findall("<td>(.*?)</td>", row)[1:] for row in re.findall("<tr>(.*?)</tr>", text)[1:]]
    memory_cells = ["512.00 MiB", "256.00 MiB", "256.00 MiB", "1.00 GiB", "300.00 MiB"]
    assert rows == [[*memory_cells, "1024.00 MiB", "-300.00 MiB"], [*memory_cells, "1.50 GiB", "+212.00 MiB"]]
    heads = re.findall('<th><span lang="en">(.*?)</span>', text)
    assert heads == ["stage", "weights", "gradients", "optimizer", *MEMORY_COLUMNS], "no part that is 0, or on the host"
    assert "memory cached by the allocator" in text
    assert set(MEMORY_COMPONENTS) == {field.name for field in dataclasses.fields(Memory)} - {"host"}
    path.write_text(json.dumps([{"stage": 0, "estimated_bytes": None}]))
    assert memory_table(read_run(folder, "run")) is None


def test_run_evaluations_have_curves_and_rows(tmp_path: Path) -> None:
    reader = read_page(make_run(tmp_path / "run"))
    data = reader.data()
    assert data["runs"][0]["valid"] == {
        "step": [30], "tokens": [30720], "hours": [0.00833333], "loss": [4.5], "perplexity": [90.02],
    }  # fmt: skip
    charts = {chart["id"]: (chart["source"], chart["keys"]) for chart in data["charts"]}
    assert charts["valid-loss"] == ("valid", ["loss"]) and charts["valid-perplexity"] == ("valid", ["perplexity"])
    page_text = " ".join(reader.words)
    assert "90.02" in page_text and "4.5000" in page_text and "3.2500" in page_text


def test_page_is_bilingual(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    write_trace(folder / "trace")
    reader = read_page(folder, make_run(tmp_path / "other", run=1))
    languages = [attributes["lang"] for tag, attributes in reader.tags if tag == "span" and "lang" in attributes]
    assert languages.count("en") == languages.count("zh") > 60
    untranslated = {text for text, chinese in ZH.items() if text == chinese}
    assert untranslated == {"MFU", "logits"}
    assert all(text.count("{}") == chinese.count("{}") for text, chinese in ZH.items())
    assert all(re.search("[\u4e00-\u9fff]|nat", chinese) for text, chinese in ZH.items() if text not in untranslated)
    data = reader.data()
    for chart in data["charts"]:
        assert {chart["title"], chart["about"]} - {""} <= set(data["zh"])
    assert {text for chart in CHARTS for text in (chart.title, chart.about) if text} <= set(ZH)
    written = re.findall(r'word\(\w* ?\??=? ?"([^"]+)"', reader.script)
    assert set(written) <= set(data["zh"]) and len(written) >= 4
    assert "navigator.language" in reader.script
    with pytest.raises(KeyError):
        bilingual("what has no Chinese")


COLOR_VISION_MATRICES = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""What eyes see of linear RGB: Machado et al. 2009, severity 1."""
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]]


def linear_rgb(colour: str) -> np.ndarray:
    channels = np.array([int(colour[offset : offset + 2], 16) / 255 for offset in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def cielab(light: np.ndarray) -> np.ndarray:
    """Return CIE L*a*b* of linear RGB: about 2 apart is just seen."""
    scaled = np.array(TO_XYZ) @ light / np.array([0.9505, 1.0, 1.0888])
    x, y, z = np.where(scaled > 216 / 24389, np.cbrt(scaled), (24389 / 27 * scaled + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_run_colors_are_distinguishable(theme: str) -> None:
    folder = Path(report.__file__).parent / "report_parts"
    palette = re.findall("#[0-9a-f]{6}", re.search(rf"{theme}: \[(.*?)\]", (folder / "report.js").read_text())[1])
    card = re.findall("--card: (#[0-9a-f]{6})", (folder / "page.html").read_text())[theme == "dark"]
    assert len(palette) == 8
    for eyes, matrix in COLOR_VISION_MATRICES.items():
        seen_colors = [cielab(np.clip(np.array(matrix) @ linear_rgb(colour), 0, 1)) for colour in palette]
        nearest = min(float(np.linalg.norm(first - second)) for first, second in itertools.combinations(seen_colors, 2))
        assert nearest > 25, eyes
    for colour in palette:
        low, high = sorted(float(np.array(TO_XYZ)[1] @ linear_rgb(color)) for color in (colour, card))
        assert (high + 0.05) / (low + 0.05) >= 3, "the contrast that lines need"


def test_folders_without_runs_exit_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none").mkdir()
    assert run_report(monkeypatch, tmp_path / "none", tmp_path / "away") == 2
    output = capsys.readouterr().err
    assert "none must be a run folder" in output and "but it contains no run" in output
    assert "away must be a run folder" in output and "but it is not a folder" in output
    make_run(tmp_path / "all" / "b"), make_run(tmp_path / "all" / "a")
    assert run_report(monkeypatch, tmp_path / "all", "-o", tmp_path / "page.html") == 0
    assert "2 runs" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        run_report(monkeypatch, tmp_path / "all", "--points", 0)
    assert run_report(monkeypatch, tmp_path / "all", "-o", tmp_path / "no" / "page.html") == 2


INTERACTION_SCRIPT = """
<script>
const chart = charts[0], notes = document.documentElement.dataset;
const before = chart.lines()[0].y.slice();
document.getElementById("smoothing").value = "0.5";
document.getElementById("smoothing").oninput({ target: document.getElementById("smoothing") });
notes.smooth = String(chart.lines()[0].y[1] !== before[1] && chart.lines()[0].y[0] === before[0]);
document.querySelector("input[data-run='1']").click();
notes.lines = String(chart.lines().length);
chart.button.click();
notes.log = chart.button.getAttribute("aria-pressed");
document.getElementById("axis").value = "tokens";
document.getElementById("axis").onchange({ target: document.getElementById("axis") });
notes.axes = charts.map((each) => each.axis()).slice(0, 3).join();
chart.point({ offsetX: chart.toX(30), offsetY: 50 });
notes.tip = chart.tip.textContent;
document.querySelector("button.all-settings").click();
notes.rows = String([...document.querySelectorAll("table.settings tr")].filter((row) => row.offsetHeight).length);
</script>
"""


CHROMIUM_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --virtual-time-budget=2000 "
    "--window-size=1400,2400"
).split()


def run_chromium(html: Path, anchor: str = "", *flags: str) -> tuple[dict[str, str], list[str]]:
    """Return what the page has noted of itself in Chromium, and what it said on the console."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        *CHROMIUM_FLAGS,
        "--enable-logging=stderr",
        "--dump-dom",
        *flags,
        f"--user-data-dir={html.parent / 'browser'}",
    ]
    result = subprocess.run([*command, f"{html.as_uri()}{anchor}"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    root = next(attributes for tag, attributes in PageReader(result.stdout).tags if tag == "html")
    console = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    return {name.removeprefix("data-"): value or "" for name, value in root.items()}, console


@needs_chromium
@pytest.mark.slow
def test_page_works_in_browser(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, run=idx, hidden_size=32 * idx) for idx, name in enumerate("<b", 1)]
    runs = [read_run(path, path.name) for path in folders]
    text = render_page(runs, "Runs")
    (tmp_path / "page.html").write_text(text.replace("</body>", f"{INTERACTION_SCRIPT}</body>"))
    notes, console = run_chromium(tmp_path / "page.html", "#dark")
    assert not console
    drawn = len(PageReader(text).data()["charts"])
    assert (notes["drawn"], notes["theme"]) == (str(drawn), "dark")
    assert (notes["smooth"], notes["lines"], notes["log"]) == ("true", "1", "true")
    assert notes["axes"] == "step,tokens,tokens"
    assert notes["tip"].startswith("step 30") and "<" in notes["tip"]
    assert notes["rows"] == str(1 + len(compare_settings(runs)))


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize(("language", "title"), [("zh-CN", "损失（按步数）"), ("en-US", "Loss over steps")])
def test_page_uses_browser_language(tmp_path: Path, language: str, title: str) -> None:
    seen = "document.documentElement.dataset"
    script = (
        f"<script>{seen}.title = charts[0].figure.querySelector('b').textContent;"
        f"{seen}.heads = document.querySelector('h2').innerText;</script></body>"
    )
    (tmp_path / "page.html").write_text(
        render_page([read_run(make_run(tmp_path / "run"), "run")], "Runs").replace("</body>", script)
    )
    notes, console = run_chromium(tmp_path / "page.html", "", f"--lang={language}", f"--accept-lang={language}")
    assert not console and notes["title"] == title
    assert notes["heads"] == ("设置" if language == "zh-CN" else "Settings")


@needs_chromium
@pytest.mark.slow
def test_browser_reports_page_errors(tmp_path: Path) -> None:
    """The test above can fail; and a page without records draws nothing."""
    folder = make_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    text = render_page([read_run(folder, "run")], "Runs")
    (tmp_path / "page.html").write_text(text)
    notes, console = run_chromium(tmp_path / "page.html")
    assert not console and notes["drawn"] == "0"
    (tmp_path / "page.html").write_text(text.replace("</body>", "<script>nothing.at.all</script></body>"))
    assert len(run_chromium(tmp_path / "page.html")[1]) == 1
