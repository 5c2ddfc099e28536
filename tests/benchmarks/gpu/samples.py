"""Made-up results of a GPU, as ``benchmarks/gpu`` writes them; nobody has measured these figures."""

from __future__ import annotations

from typing import Any

GIB = 2**30
CONTENDER_ROW = {
    "ms": 300.0,
    "ms_quartiles": [299.0, 300.0, 301.0],
    "tokens_per_s": 54613.3,
    "mfu": 0.5,
    "mfu_whole": 0.55,
    "mfu_sheet": 0.4,
    "allocated_bytes": 48 * GIB,
    "reserved_bytes": 50 * GIB,
    "compile_s": 0.0,
    "last_loss": 10.8,
}


def make_figures(title: str, family: str = "gpt2", **mfu: float) -> dict[str, Any]:
    """Return the figures of a case with these contenders."""
    lengths = {"enc_seq_length": 1024} if family == "t5" else {"seq_length": 1024}
    model_sizes = {"num_layers": 5, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
    rows = {name.replace("_", "-"): CONTENDER_ROW | {"mfu": value} for name, value in mfu.items()}
    rows["ours"] = rows["ours"] | {"memory_ratio": 0.97, "planner_ratio": 1.04, "estimated_bytes": 46 * GIB}
    return {
        "title": title,
        "family": family,
        "seq_length": 1024,
        "batch_size": 8,
        "sizes": model_sizes | lengths,
        "parameters": 1_300_000_000,
        "product_flops": 700e12,
        "sheet_flops": 989e12,
        "contenders": rows,
        "attention": [{"kernel": "CUDNN_ATTENTION", "query": [8, 16, 1024, 128]}],
    }


def make_case(status: str = "passed", figures: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a verdict."""
    return {"status": status, "text": "made up", "figures": figures or {}, "seconds": 1.0}


def make_results(**overrides: Any) -> dict[str, Any]:
    """Return the content of a file of results, with ``overrides`` in place of what it has."""
    speed = {
        "gpt2 1.3b s1024": make_case(
            figures=make_figures("GPT-2 1.3B", ours=0.51, ours_compiled=0.56, hf=0.31, plain=0.41)
        ),
        "t5-base s1024": make_case(figures=make_figures("T5-base", "t5", ours=0.26, hf=0.16)),
        "llama 7b slice s1024": make_case(figures=make_figures("LLaMA 7B, a slice", "llama", ours=0.61, hf=0.36)),
        "gpt2 125m s1024": make_case(figures=make_figures("GPT-2 125M", ours=0.46)),
        "gpt2 350m s1024": make_case("failed"),
        "planner": make_case(figures={"seconds": 40.0}),
    }
    return {
        "device": "NVIDIA Made-up 1",
        "kind": "cuda",
        "is_dry": False,
        "date": "2026-12-01",
        "num_devices": 1,
        "memory_bytes": 139 * GIB,
        "commit": "0123456789abcdef",
        "versions": {"torch": "2.11.0", "deepspeed": "0.19.8"},
        "cuda": "13.0",
        "parts": {
            "tests": {
                "seconds": 9.0,
                "cases": {"a": make_case(), "b": make_case("failed"), "c": make_case("skipped"), "d": make_case()},
            },
            "speed": {"seconds": 99.0, "cases": speed},
        },
        **overrides,
    }
