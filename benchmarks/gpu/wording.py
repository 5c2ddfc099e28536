"""The words of ``benchmarks/gpu/tables.py``, English and Chinese."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.results import FAILED, NOT_RUN, PASSED, SKIPPED

WORDS: Mapping[str, Mapping[str, Any]] = {
    "en": {
        PASSED: "passed",
        FAILED: "failed",
        SKIPPED: "skipped",
        NOT_RUN: "not run",
        "seen": ("device", "date", "commit", "torch, CUDA"),
        "speeds": (
            "model",
            "tokens x sequences",
            "step of",
            "ms",
            "tokens/s",
            "MFU",
            "of the sheet",
            "GiB allocated, reserved",
            "memory",
            "planner",
        ),
        "short": ("MFU on", "ours", "ours, compiled", "Hugging Face", "plain loop"),
        "names": {"ours": "ours", "ours-compiled": "ours, compiled", "hf": "Hugging Face", "plain": "plain loop"},
        "nothing on the page": (
            "Nothing yet: every figure and every test of this repository is from a CPU. The code for CUDA and NCCL is "
            "written, but has not run\non a GPU. `bash benchmarks/gpu/run.sh` is the one command that shows it, on any "
            "GPU from 16 GB."
        ),
        "nothing in front": (
            "**Seen on a GPU: nothing yet.** Every figure and test here is from a CPU; the code for CUDA and NCCL is "
            "written, but has not run.\n`bash benchmarks/gpu/run.sh` is [the one command that shows it]"
            "(docs/accelerators.md#what-has-been-seen-on-a-gpu) on any GPU from 16 GB."
        ),
        "in front": "**Seen on** {what} ([all](docs/accelerators.md#what-has-been-seen-on-a-gpu)).",
        "explained": (
            "A step in bf16 without dropout on {device} ({date}, commit {commit}), medians of rounds. MFU is over the "
            'matrix products of the same run\n({products}) and counts half of causal attention; "of the sheet" is over '
            'the data sheet\'s peak. "memory" and "planner" are what `megatron.models`\nand the planner say over what '
            "was measured."
        ),
        "picture": "MFU of a step on {device}",
    },
    "zh": {
        PASSED: "通过",
        FAILED: "失败",
        SKIPPED: "跳过",
        NOT_RUN: "未运行",
        "seen": ("设备", "日期", "提交", "torch、CUDA"),
        "speeds": (
            "模型",
            "词元 x 序列",
            "谁的一步",
            "毫秒",
            "词元/秒",
            "MFU",
            "占标称峰值",
            "已分配、已保留 GiB",
            "内存",
            "规划",
        ),
        "short": ("MFU，设备", "我们的", "我们的，编译", "Hugging Face", "朴素循环"),
        "names": {"ours": "我们的", "ours-compiled": "我们的，编译", "hf": "Hugging Face", "plain": "朴素循环"},
        "nothing on the page": (
            "还没有：本仓库的每一个数字、每一项测试都来自 CPU。CUDA 与 NCCL 的代码已经写好，"
            "但还没有在 GPU 上运行过。只要一条命令就能验证，\n"
            "任何 16 GB 以上的 GPU 都可以：`bash benchmarks/gpu/run.sh`。"
        ),
        "nothing in front": (
            "**在 GPU 上验证过的：还没有。** 这里的所有数字和测试都来自 CPU；CUDA 与 NCCL 的代码已经写好，"
            "但还没有运行过。\n要在 16 GB 以上的任何 GPU 上验证，"
            "[只要一条命令](accelerators.md#在-gpu-上验证过什么)：`bash benchmarks/gpu/run.sh`。"
        ),
        "in front": "**验证过的设备：** {what}（[全部结果](accelerators.md#在-gpu-上验证过什么)）。",
        "explained": (
            "bf16、没有 dropout 的一步，在 {device} 上（{date}，提交 {commit}），取各轮的中位数。"
            "MFU 以同一次运行里的矩阵乘法（{products}）为 1，\n"
            "因果注意力只计一半；“占标称峰值”以厂商标称的峰值为 1。"
            "“内存”和“规划”是 `megatron.models` 和规划工具的估计与实测之比。"
        ),
        "picture": "{device} 上一步的 MFU",
    },
}
