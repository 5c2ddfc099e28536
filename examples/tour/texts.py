"""Texts of the tour in English and Chinese."""

from __future__ import annotations

from collections.abc import Mapping

TEXTS = {
    "intro": (
        "This tour shows what happens when training goes wrong. Each section runs the printed command, which you can "
        "repeat, and shows lines of its output. The faults are in examples/tour/faults.py. The tour takes about "
        "two minutes on two idle CPU cores. Press Ctrl-C to stop it.",
        "本程序演示训练出错时会发生什么。每节运行所打印的命令（可以自行重复），并摘录它的输出。故障由 "
        "examples/tour/faults.py 注入。全部演示在两个 CPU 核上约需两分钟；按 Ctrl-C 停止。",
    ),
    "running": ("running", "运行中"),
    "needed": ("{name} is needed for the comparison in {others}", "{others} 要与 {name} 的结果比较，因此先运行它"),
    "link": ("More: {page}", "详见 {page}。"),
    "detected": ("Done in {seconds:.0f} s.", "完成，用时 {seconds:.0f} 秒。"),
    "failed": (
        "FAILED: {reason}. The last lines of {log}:",
        "失败：{reason}。{log} 的最后几行：",
    ),
    "wrong code": (
        "the command must end with code {expected}, got {code}",
        "命令应以代码 {expected} 结束，实际为 {code}",
    ),
    "missing line": (
        "the output must have a line that matches {pattern!r}",
        "输出中应有与 {pattern!r} 匹配的行",
    ),
    "timeout": ("the section must end within {limit}", "本节应在 {limit} 内结束"),
    "stopped": (
        "The tour was stopped; all its processes have ended.",
        "已停止，所有进程都已结束。",
    ),
    "summary": (
        "{num} of {num} sections ended as expected, in {minutes}:{seconds:02d}. The full outputs are in {folder}.",
        "{num} 节全部符合预期，用时 {minutes}:{seconds:02d}。完整输出在 {folder} 中。",
    ),
    "loss fell": (
        "the loss must fall by at least {min_fall}, got {first:.4f} to {last:.4f}",
        "损失至少应下降 {min_fall}，实际从 {first:.4f} 到 {last:.4f}",
    ),
    "losses": (
        "step {step}: loss {loss!r} without the fault, {other!r} with it",
        "第 {step} 步：无故障时损失为 {loss!r}，有故障时为 {other!r}",
    ),
    "losses differ": (
        "losses after the restart may differ from those without the fault by at most {bound:g}, got {difference:g}",
        "重启后的损失与无故障时的损失之差不得超过 {bound:g}，实际为 {difference:g}",
    ),
    "train.title": ("A small model, without a fault", "没有故障的小模型"),
    "train.before": (
        "Four processes train a GPT-2 of 1.1 million parameters on the sample stories for 40 steps: two pipeline "
        "stages with two tensor ranks each.",
        "四个进程在样例故事上训练一个 110 万参数的 GPT-2，共 40 步：两个流水段，每段两个张量并行进程。",
    ),
    "train.after": (
        "The loss falls. The first line is from the layout check: during the first steps, it compares the gradients "
        "of a small model in this layout with the gradients of a single process.",
        "损失在下降。第一行来自布局检查：训练在最初几步的同时，把一个小模型在这种布局下的梯度与单进程的梯度比较。",
    ),
    "kill.title": ("A rank is killed", "一个进程被杀死"),
    "kill.before": (
        "The same run saves in steps 20 and 40. In step 28, between backward and update, rank 3 is killed (kill -9).",
        "同样的训练在第 20 步和第 40 步保存。在第 28 步的反向与更新之间，rank 3 被 kill -9。",
    ),
    "kill.after": (
        "The launcher names the rank and its operation, ends the others and restarts all from the checkpoint of "
        "step 20. The losses equal those of the first section bit for bit.",
        "启动器指出是哪个进程、当时在做什么，结束其余进程，并从第 20 步的检查点重新开始；损失与第一节逐位相同。",
    ),
    "nan.title": ("A NaN", "出现 NaN"),
    "nan.before": (
        "In step 6, one value in the output of an MLP becomes NaN. The first run locates the module. The second one "
        "skips the step.",
        "在第 6 步，某个 MLP 的输出中有一个值变成 NaN。第一次运行找出是哪个模块，第二次运行跳过该步。",
    ),
    "nan.after": (
        "The first run ends before the update with code 5 and names the module. The second one skips the step on all "
        "ranks, leaves the weights unchanged and continues.",
        "第一次运行在更新之前以代码 5 结束，并指出模块。第二次运行在所有进程上跳过该步，权重不变，然后继续。",
    ),
    "leak.title": ("Documents leak into one another", "文档相互泄漏"),
    "leak.before": (
        "A sample contains several documents. With the fault, the two ranks that share each sequence do not reset the "
        "attention mask at the end of a document. Nothing raises an error.",
        "一个样本里有多个文档。故障使分担同一序列的两个进程不在文档末尾重置注意力掩码。程序不报任何错误。",
    ),
    "leak.after": (
        "The layout check trains a small model in fp64, in this layout and in one process. The losses differ, so the "
        "command exits with code 1. A training run performs the same check and would exit with code 5.",
        "布局检查用 fp64 分别在该布局和单进程中训练一个小模型：损失不同，因此命令以代码 1 结束。训练也会这样检查自己，"
        "并以代码 5 结束。",
    ),
    "gradient.title": ("A wrong gradient in one layout", "某种布局的梯度有误"),
    "gradient.before": (
        "With sequence parallelism, each tensor rank computes the gradients of norms from its own tokens only. The "
        "fault omits the all-reduce that sums them.",
        "使用序列并行时，每个张量并行进程只有自己那部分词元对归一化层的梯度。故障省去了对它们求和的 all-reduce。",
    ),
    "gradient.after": (
        "The check compares every gradient and names the worst one. The loss of the first step is correct, so a loss "
        "curve would not have shown the fault.",
        "检查会比较每个梯度，并指出误差最大的一个。第一步的损失是正确的，所以从损失曲线上看不出这个故障。",
    ),
    "host.title": ("A lost host", "一台主机丢失"),
    "host.before": (
        "Two launchers on this machine act as two hosts with two tensor ranks each. In step 28, all processes of "
        "host 1 are killed.",
        "本机上的两个启动器充当两台主机，各有两个张量并行进程。在第 28 步，主机 1 的所有进程被杀死。",
    ),
    "host.after": (
        "The job continues on one host from the checkpoint of step 20. The global batch and the order of the samples "
        "are unchanged, so the losses equal those of the first section up to rounding.",
        "任务在剩下的一台主机上从第 20 步的检查点继续。全局批次和样本顺序不变，因此损失与第一节只有舍入误差。",
    ),
}
"""Key -> (English, Chinese)."""


def choose_language(environment: Mapping[str, str]) -> str:
    """Return "zh" if the locale of ``environment`` is Chinese, otherwise "en"."""
    locale = next(filter(None, (environment.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return "zh" if locale.lower().startswith("zh") else "en"


class Texts:
    """The texts in one language: ``texts("running")``, ``texts("link", page="...")``."""

    def __init__(self, language: str) -> None:
        self.language = language
        self._idx = ("en", "zh").index(language)

    def __call__(self, key: str, **values: object) -> str:
        return TEXTS[key][self._idx].format(**values)
