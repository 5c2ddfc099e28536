"""Functions that create HTML with escaped text, and the report's texts in English and Chinese.

``bilingual`` writes a text in both languages; the style sheet displays the browser's language.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


class Html(str):
    """Text that is already HTML."""


def html(value: Any) -> Html:
    """Return ``value`` as HTML: text is escaped, ``Html`` is returned unchanged, and None is empty."""
    return value if isinstance(value, Html) else Html(escape("" if value is None else str(value)))


def tag(name: str, *children: Any, **attributes: Any) -> Html:
    """Return an element; ``class_`` sets class, and ``data_run`` sets data-run.

    None and False omit an attribute, and True writes it without a value.
    """
    attribute_text = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{attribute_text}>{join_html(children)}</{name}>")


def join_html(items: Iterable[Any], separator: str = "") -> Html:
    """Join the items into HTML; text is escaped."""
    return Html(separator.join(html(item) for item in items))


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], **attributes: Any) -> Html:
    """Return a table that scrolls if it is too wide. Cells that are not <td> elements are wrapped in <td>."""
    body = [tag("tr", *[_cell(cell) for cell in row]) for row in rows]
    inner = join_html([tag("thead", tag("tr", *[tag("th", cell) for cell in head])), tag("tbody", *body)])
    return tag("div", tag("table", inner, **attributes), class_="scroll")


def section(title: str | Html, *children: Any, id_: str, is_open: bool = True) -> Html:
    """Return a collapsible section of the report."""
    return tag("details", tag("summary", tag("h2", title)), *children, class_="card", id=id_, open=is_open)


def _cell(value: Any) -> Html:
    return value if isinstance(value, Html) and value.startswith("<td") else tag("td", value)


ZH = {
    # header and controls
    "theme": "主题",
    "{} run, {}": "{} 次训练，{}",
    "{} runs, {}": "{} 次训练，{}",
    "JavaScript is disabled, so no curves are drawn. The tables are complete.": (
        "JavaScript 已禁用，不显示曲线；表格不受影响。"
    ),
    "smoothing": "平滑",
    "x axis": "横轴",
    "checkpoints and restarts": "检查点和重启",
    "drag over a chart to zoom, double-click to reset; click a run above to hide it": (
        "在图上拖动可放大，双击复原；点击上方的训练可将其隐藏"
    ),
    # summary table
    "run": "训练",
    "state": "状态",
    "model": "模型",
    "ranks": "进程数",
    "steps": "步数",
    "loss": "损失",
    "validation": "验证",
    "test": "测试",
    "tokens": "词元数",
    "time": "时间",
    "tokens/s": "词元/秒",
    "MFU": "MFU",
    "memory": "内存",
    "skipped": "跳过",
    "starts": "启动次数",
    "evaluated": "已评测",
    "no records": "没有记录",
    "non-finite loss at step {}": "第 {} 步的损失不是有限值",
    "finished": "已完成",
    "at step {}": "第 {} 步",
    "at step {} of {}": "第 {} 步，共 {} 步",
    "at sample {} of {}": "第 {} 个样本，共 {} 个样本",
    # charts
    "Loss over steps": "损失（按步数）",
    "Loss over tokens": "损失（按词元数）",
    "Validation loss": "验证损失",
    "Validation perplexity": "验证困惑度",
    "Tasks": "任务",
    "lm_eval tasks from --eval-tasks": "--eval-tasks 指定的 lm_eval 任务",
    "Learning rate": "学习率",
    "Gradient norm": "梯度范数",
    "Throughput": "吞吐量",
    "Pipeline bubble": "流水线气泡",
    "Compute time by stage": "各流水段的计算时间",
    "Memory by stage": "各流水段的内存",
    "Waiting for data": "等待数据",
    "Waiting for checkpoints": "等待检查点",
    "Gradient norm by layer": "各层的梯度范数",
    "Expert load imbalance": "专家负载不均",
    "largest load divided by the mean, by layer": "各层最大负载与平均值之比",
    "Expert load entropy": "专家负载的熵",
    "by layer; 1: uniform load": "各层的熵，1 表示负载均匀",
    "Dropped selections": "被丢弃的选择",
    "fraction over capacity": "超出容量的比例",
    "Tokens by corpus": "各语料的词元数",
    "Loss scale": "损失缩放",
    "Skipped steps": "跳过的步数",
    "nats per token; circles: validation": "每词元的 nat 数；圆圈：验证",
    "nats per token": "每词元的 nat 数",
    "exp(loss)": "exp(损失)",
    "before clipping": "裁剪前",
    "fraction of the devices' peak": "占设备峰值的比例",
    "dashed: predicted": "虚线：预测",
    "seconds per step": "每步的秒数",
    "peak so far": "截至当前的峰值",
    "fraction of time": "占总时间的比例",
    "since the previous record": "自上一条记录以来",
    "hours": "小时",
    "step": "步",
    "log": "对数",
    "predicted": "预测",
    "no data": "没有数据",
    # sections
    "Settings": "设置",
    "{} of {} settings differ.": "有 {} 项设置不同，共 {} 项。",
    "{} settings.": "共 {} 项设置。",
    "show all": "全部显示",
    "show differences only": "只显示不同项",
    "setting": "设置",
    "Stages": "流水段",
    "stage": "流水段",
    "stage {}": "流水段 {}",
    "layers": "层",
    "parameters per rank": "每个进程的参数量",
    "compute time per step": "每步的计算时间",
    "idle": "空闲",
    "Estimated and measured memory": "估计内存与实测内存",
    "weights": "权重",
    "gradients": "梯度",
    "optimizer": "优化器",
    "activations": "激活",
    "logits": "logits",
    "gathered": "汇集的权重",
    "buffers": "缓冲区",
    "before model build": "构建模型之前",
    "estimated": "估计",
    "measured": "实测",
    "measured - before - estimated": "实测 - 构建之前 - 估计",
    "The estimated memory is the planner's estimate for the model and its training on one rank, the sum of the columns "
    "to its left. The measured memory is a rank's peak: memory allocated by torch on a GPU, the resident set size of "
    "the process on a CPU.": (
        "“估计”列是规划器对一个进程上的模型及其训练的内存估计，等于左边各列之和。“实测”列是一个进程的内存峰值："
        "GPU 上是 torch 分配的内存，CPU 上是整个进程的常驻内存。"
    ),
    "They differ by the memory in use before the model was built (Python, torch, libraries) and by the remainder in "
    "the last column. A positive remainder is memory that the estimate does not include: temporary tensors within "
    "operators, memory cached by the allocator, threads, files and prefetched data. A negative remainder means that "
    "the estimated tensors were not all allocated at the same time, or that they reused free memory.": (
        "两者之差等于构建模型之前已占用的内存（Python、torch、各种库）加上最后一列的余量。余量为正，表示有估计未计入"
        "的内存：算子内部的临时张量、分配器缓存的内存、线程、文件和预取的数据。余量为负，表示估计的张量没有全部同时"
        "分配，或者复用了已释放的内存。"
    ),
    "Tokens by expert": "各专家的词元数",
    "Step {}: one row per layer, one cell per expert. Each row ends with its largest load divided by the mean.": (
        "第 {} 步：每行一层，每格一个专家，行末的数字是该层最大负载与平均值之比。"
    ),
    "no tokens": "没有词元",
    "{} x the mean": "平均值的 {} 倍",
    "{} x the mean or more": "平均值的 {} 倍及以上",
    "Evaluations": "评测",
    "split": "划分",
    "perplexity": "困惑度",
    "by corpus": "各语料",
    "checkpoint": "检查点",
    "Pipeline": "流水线",
    "{}, step {}, {} micro-batches. Trace: {}": "{}，第 {} 步，{} 个微批。轨迹：{}",
    "The trace cannot be drawn: {}": "无法绘制轨迹：{}",
    "simulated with the measured costs": "按实测耗时模拟",
    "{}: {} ms, bubble {} %": "{}：{} 毫秒，气泡 {} %",
    " (not drawn: more than {} boxes)": "（方块超过 {} 个，不绘制）",
    "forward": "前向",
    "backward": "反向",
    "backward for the input": "对输入的反向",
    "backward for the weights": "对权重的反向",
    "Slowest operators": "最耗时的算子",
    "operator": "算子",
    "{} ms": "{} 毫秒",
    "device": "设备",
    "host": "主机",
    "calls": "调用次数",
    "Self time per step and rank, averaged over {} steps and {} ranks. Traces: {}": (
        "每个进程每步的自身时间，按 {} 步、{} 个进程取平均。轨迹：{}"
    ),
    "Commands and versions": "命令和版本",
    "{} samples read": "已读取 {} 个样本",
}
"""English -> Chinese for all fixed texts of the report; {} stands for a value."""

SCRIPT_TEXTS = (
    "log", "predicted", "no data", "show all", "show differences only", "steps", "step", "tokens", "hours",
)  # fmt: skip
"""Texts that report.js inserts, in addition to the charts' titles and ``about`` texts."""


def bilingual(text: str, *values: Any) -> Html:
    """Return ``text`` in both languages, with each {} replaced by a value.

    Raises:
        KeyError: ``text`` has no Chinese translation.
    """
    return join_html(
        [tag("span", _fill_in(text, values), lang="en"), tag("span", _fill_in(ZH[text], values), lang="zh")]
    )


def _fill_in(text: str, values: tuple[Any, ...]) -> Html:
    return Html(str(html(text)).format(*map(html, values)))
