"""HTML elements that escape all text of a run, and the labels of the report in English and Chinese.

``bilingual`` writes both languages, and the style sheet shows the language of the browser.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


class Html(str):
    """Text that is already HTML."""


def html(value: Any) -> Html:
    """Return ``value`` as HTML, escaped unless it is already HTML."""
    return value if isinstance(value, Html) else Html(escape("" if value is None else str(value)))


def tag(name: str, *children: Any, **attributes: Any) -> Html:
    """Return an element. ``class_`` sets the attribute class; True adds an attribute without a value."""
    attribute_text = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{attribute_text}>{join_html(children)}</{name}>")


def join_html(items: Iterable[Any], separator: str = "") -> Html:
    """Concatenate the parts as HTML."""
    return Html(separator.join(html(item) for item in items))


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], **attributes: Any) -> Html:
    """Return a table that scrolls if it is too wide. Cells are wrapped in <td> unless they are <td> elements."""
    body = [tag("tr", *[_cell(cell) for cell in row]) for row in rows]
    inner = join_html([tag("thead", tag("tr", *[tag("th", cell) for cell in head])), tag("tbody", *body)])
    return tag("div", tag("table", inner, **attributes), class_="scroll")


def section(title: str | Html, *children: Any, id_: str, is_open: bool = True) -> Html:
    """Return a collapsible section of the report."""
    return tag("details", tag("summary", tag("h2", title)), *children, class_="card", id=id_, open=is_open)


def _cell(value: Any) -> Html:
    return value if isinstance(value, Html) and value.startswith("<td") else tag("td", value)


ZH = {
    # the frame of the page
    "theme": "主题",
    "{} run, {}": "{} 次训练，{}",
    "{} runs, {}": "{} 次训练，{}",
    "JavaScript is disabled, so no curves are drawn. The tables are complete.": (
        "JavaScript 已禁用，因此不画曲线；表格是完整的。"
    ),
    "smoothing": "平滑",
    "x axis": "横轴",
    "checkpoints and restarts": "检查点和重启",
    "drag over a chart to zoom, double-click to reset; click a run above to hide it": (
        "在图上拖动可放大，双击恢复；点上方的训练可隐藏它"
    ),
    # the table of runs
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
    "no record": "没有记录",
    "loss not finite at step {}": "第 {} 步损失不是有限数",
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
    "lm_eval tasks of --eval-tasks": "lm_eval 的任务，由 --eval-tasks 给出",
    "Learning rate": "学习率",
    "Gradient norm": "梯度范数",
    "Throughput": "吞吐量",
    "Pipeline bubble": "流水线气泡",
    "Work by stage": "各流水段的计算时间",
    "Memory by stage": "各流水段的内存",
    "Waiting for data": "等待数据",
    "Waiting for checkpoints": "等待检查点",
    "Gradient norm by layer": "各层的梯度范数",
    "Load imbalance of experts": "专家负载不均",
    "largest relative to the mean, by layer": "最大值与平均值之比，按层",
    "Entropy of experts": "专家份额的熵",
    "of the token shares; 1: uniform": "词元份额的熵，1 表示均匀",
    "Dropped choices": "丢弃的选择",
    "over the capacity": "超出容量",
    "Tokens of each corpus": "各语料的词元数",
    "Loss scale": "损失缩放",
    "Skipped steps": "跳过的步",
    "nats per token; rings: validation": "每词元的 nat 数；圆圈：验证",
    "nats per token": "每词元的 nat 数",
    "exp(loss)": "exp(损失)",
    "before clipping": "裁剪之前",
    "fraction of the devices' peak": "占设备峰值的比例",
    "dashed: predicted": "虚线：预测",
    "seconds per step": "每步的秒数",
    "peak so far": "到此为止的最大值",
    "fraction of the time": "占时间的比例",
    "since the previous record": "自上一条记录以来",
    "hours": "小时",
    "step": "步",
    "log": "对数",
    "predicted": "预测",
    "no data": "没有数据",
    # sections
    "Settings": "设置",
    "{} of {} settings differ.": "{} 项设置不同，共 {} 项。",
    "{} settings of the run.": "这次训练的 {} 项设置。",
    "show all": "全部显示",
    "show differences only": "只显示不同的",
    "setting": "设置",
    "Stages": "流水段",
    "stage": "流水段",
    "stage {}": "流水段 {}",
    "layers": "层",
    "parameters per rank": "每个进程的参数",
    "work per step": "每步的计算时间",
    "idle": "空闲",
    "Memory, estimated and measured": "内存：估计与实测",
    "weights": "权重",
    "gradients": "梯度",
    "optimizer": "优化器",
    "activations": "激活",
    "logits": "logits",
    "gathered": "汇集的权重",
    "buffers": "缓冲区",
    "before the model": "构建模型之前",
    "estimated": "估计",
    "measured": "实测",
    "measured - before - estimated": "实测 - 构建之前 - 估计",
    "Estimated is the planner's memory estimate for the model and its training on one rank, the sum of the columns to "
    "its left. Measured is the peak memory of a rank: of torch's allocator on a GPU, the resident size of the process "
    "on a CPU.": (
        "“估计”是规划器对一个进程上的模型及其训练估计的内存，等于它左边各列之和。“实测”是一个进程的内存峰值："
        "GPU 上取自 torch 的分配器，CPU 上是整个进程的常驻内存。"
    ),
    "They differ by the memory in use before the model was built (Python, torch, libraries) and by the last column. "
    "Above 0, it is memory that the estimate does not include: temporary tensors within an operator, memory cached by "
    "the allocator, threads, files and prefetched data. Below 0, the estimated tensors were not all allocated at the "
    "same time, or they reused free memory.": (
        "两者之差等于构建模型之前已占用的内存（Python、torch、各种库）加上最后一列。最后一列大于 0 时，是估计没"
        "有计入的内存：算子内部的临时张量、分配器缓存的内存、线程、文件和预取的数据。小于 0 时，估计的张量没有"
        "同时分配，或者使用了已释放的内存。"
    ),
    "Tokens by expert": "各专家的词元数",
    "Step {}: a row per layer and a cell per expert; each row ends with its busiest expert's load over the mean.": (
        "第 {} 步：每行一层，每格一个专家。行末是负载最大的专家与平均值之比。"
    ),
    "no token": "没有词元",
    "{} x the mean": "平均值的 {} 倍",
    "{} x the mean or more": "平均值的 {} 倍及以上",
    "Evaluations": "评测",
    "split": "划分",
    "perplexity": "困惑度",
    "by corpus": "各语料",
    "checkpoint": "检查点",
    "Pipeline": "流水线",
    "{}, step {}, {} micro-batches. Trace: {}": "{}，第 {} 步，{} 个微批。轨迹：{}",
    "The trace cannot be drawn: {}": "轨迹无法画出：{}",
    "simulated with the measured costs": "按实测耗时模拟",
    "{}: {} ms, bubble {} %": "{}：{} 毫秒，气泡 {} %",
    " (more than {} boxes, which are not drawn)": "（方块多于 {} 个，不画出）",
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
        "每个进程每步的自身时间，取 {} 步、{} 个进程的平均。轨迹：{}"
    ),
    "Commands and versions": "命令和版本",
    "{} samples read": "已读 {} 个样本",
}
"""English -> Chinese text, with {} for values; contains all fixed texts of the report."""

SCRIPT_TEXTS = (
    "log", "predicted", "no data", "show all", "show differences only", "steps", "step", "tokens", "hours",
)  # fmt: skip
"""Texts that JavaScript inserts, in addition to the titles of the charts."""


def bilingual(text: str, *values: Any) -> Html:
    """Return ``text`` in both languages, with a value for each {}.

    Raises:
        KeyError: there is no Chinese translation.
    """
    return join_html(
        [tag("span", _fill_in(text, values), lang="en"), tag("span", _fill_in(ZH[text], values), lang="zh")]
    )


def _fill_in(text: str, values: tuple[Any, ...]) -> Html:
    return Html(str(html(text)).format(*map(html, values)))
