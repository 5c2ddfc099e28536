"""Train narrow and wide models for a few steps and plot the sizes of their activations: the coordinate check of muP.

    python tools/coord_check.py --out coord.png
    python tools/coord_check.py --widths 64 128 256 --steps 5 --lr 0.02 --out coord.png --activation gated-silu

Models of every width are trained twice on the same random tokens: without muP, and with muP and the first width as
--mup-base-hidden-size. For each step the plot shows, over the width, the mean absolute output of attention and
feed-forward parts, of the residual stream after each layer, and of the logits. With muP the curves are flat. Without it
they rise with the width, so a learning rate that suits one width is too high for the next.

Flags that this tool does not know are flags of the model and the optimizer: see pretrain_gpt2.py --help-all. Heads have
size 16, so wide models have more of them. With --heads 4 there are 4 heads of increasing size, and muP uses
--mup-base-head-dim.

Source: Yang et al. 2022, "Tensor Programs V: tuning large neural networks via zero-shot hyperparameter transfer",
section D.1 and figure 5.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line

import torch  # noqa: E402

from megatron.config import Config, parse  # noqa: E402
from megatron.errors import ConfigError  # noqa: E402
from megatron.models.common.decoder import DecoderModel, model_args  # noqa: E402
from megatron.mpu.groups import single_grid  # noqa: E402
from megatron.optim.lr_scheduler import set_learning_rates  # noqa: E402
from megatron.training import optimizer_setup, setup  # noqa: E402
from megatron.training.world import World  # noqa: E402

WIDTHS = (64, 128, 192, 256)
HEAD_SIZE, VOCAB, LENGTH, BATCH = 16, 64, 16, 4
MODEL = (
    f"--num-layers 2 --seq-length {LENGTH} --vocab-size {VOCAB} --init-method-std 0.05 --attention-dropout 0 "
    "--hidden-dropout 0 --data-path none --device cpu --fp32 --lr-decay-style constant --warmup 0 --weight-decay 0 "
    "--clip-grad 0 --adam-beta2 0.99 --train-iters 100"
)
CURVES = {
    "attention": r"layers\.\d+\.attention",
    "feed-forward": r"layers\.\d+\.mlp",
    "residual stream": r"layers\.\d+",
}
CURVES["logits"] = "logits"
"""Curve of the plot -> regular expression for the names of the modules whose outputs it shows."""
Magnitudes = dict[str, list[float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the requested plot and print by how much the curves rise; return the exit code."""
    parser = make_parser()
    flags, model_flags = parser.parse_known_args(argv)
    try:
        results = {has_mup: train_widths(flags, model_flags, has_mup=has_mup) for has_mup in (False, True)}
    except ConfigError as error:
        parser.error(str(error))
    for has_mup, by_width in results.items():
        ratios_text = ", ".join(f"{curve} {growth_ratio(by_width, curve):.2f}" for curve in CURVES)
        print(
            f"{'with muP' if has_mup else 'without muP'}: growth from width {flags.widths[0]} to {flags.widths[-1]}: "
            f"{ratios_text}"
        )
    draw(results, flags.out)
    print(f"plot written to {flags.out}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the tool's parser; flags that it does not know belong to the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--widths", type=int, nargs="+", default=list(WIDTHS), help="hidden sizes, the first is the base"
    )
    parser.add_argument("--steps", type=int, default=4, help="number of updates (default: 4)")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of the first width (default: 0.02)")
    parser.add_argument("--heads", type=int, default=0, help="attention heads at every width; 0: heads of size 16")
    parser.add_argument("--out", type=Path, default=Path("coord_check.png"), help="plot to write, PNG or SVG")
    return parser


def train_widths(flags: argparse.Namespace, model_flags: Sequence[str], *, has_mup: bool) -> dict[int, Magnitudes]:
    """Train a model of each width, and return width -> mean sizes of the outputs of ``CURVES``.

    The first size of each list is measured before the first update, and one more after each update.
    """
    base_width = flags.widths[0]
    results = {}
    for width in flags.widths:
        heads = flags.heads or width // HEAD_SIZE
        words = [
            *MODEL.split(),
            "--hidden-size",
            str(width),
            "--num-attention-heads",
            str(heads),
            "--lr",
            str(flags.lr),
        ]
        if has_mup:
            words += ["--mup-base-hidden-size", str(base_width)]
            words += ["--mup-base-head-dim", str(base_width // flags.heads)] if flags.heads else []
        config = parse([*words, *model_flags], world_size=1, env={}).with_vocab(VOCAB)
        results[width] = measure_magnitudes(config, flags.steps)
    return results


def measure_magnitudes(config: Config, steps: int) -> Magnitudes:
    """Train a model of ``config`` for ``steps`` steps; return part -> mean size of its output in each forward pass."""
    world = World("cpu", torch.device("cpu"), single_grid(), 0)
    model = DecoderModel(model_args(config))
    setup.initialize_and_move(config, model, world)
    optimizer, schedule = (
        optimizer_setup.make_optimizer(config, model, world),
        optimizer_setup.make_lr_scheduler(config),
    )
    magnitudes: Magnitudes = {curve: [] for curve in CURVES}
    generator = torch.Generator().manual_seed(config.run.seed)
    token_ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
    tokens, labels, mask = token_ids[:, :-1], token_ids[:, 1:], torch.ones(BATCH, LENGTH)
    for step in range(steps + 1):
        with record_outputs(model, magnitudes), torch.no_grad():
            magnitudes["logits"].append(mean_magnitude(model(tokens)))
        set_learning_rates(optimizer, schedule, schedule.position(step, 1))
        total, count = model(tokens, labels=labels, loss_mask=mask)
        (total / count).backward()
        optimizer.step()
    return magnitudes


@contextmanager
def record_outputs(model: torch.nn.Module, magnitudes: Magnitudes) -> Iterator[None]:
    """Record the outputs of ``CURVES`` in the block; append each curve's mean over all layers to ``magnitudes``."""
    outputs: dict[str, list[float]] = {}
    handles = [
        module.register_forward_hook(
            lambda _, __, output, curve=curve: outputs.setdefault(curve, []).append(mean_magnitude(output))
        )
        for name, module in model.named_modules()
        for curve, pattern in CURVES.items()
        if re.fullmatch(pattern, name)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for curve, values in outputs.items():
        magnitudes[curve].append(sum(values) / len(values))


def mean_magnitude(tensor: torch.Tensor) -> float:
    """Return the mean absolute value of a tensor."""
    return tensor.detach().abs().mean().item()


def growth_ratio(by_width: dict[int, Magnitudes], curve: str) -> float:
    """Return the ratio of the size of ``curve`` in the widest model to that in the narrowest, after the last update."""
    first, *_, last = (magnitudes[curve][-1] for magnitudes in by_width.values())
    return last / first


def draw(results: dict[bool, dict[int, Magnitudes]], path: Path) -> None:
    """Draw a row of panels without muP and a row with muP, with a curve for each step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.4))
    panels = figure.subplots(2, len(CURVES), sharex=True, sharey="col")
    for row, (has_mup, by_width) in zip(panels, results.items(), strict=True):
        for axes, curve in zip(row, CURVES, strict=True):
            draw_panel(axes, by_width, curve)
            axes.set_title(f"{'with muP' if has_mup else 'without muP'}: {curve}", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("hidden size")
    panels[0][0].set_ylabel("mean |activation|")
    panels[1][0].set_ylabel("mean |activation|")
    panels[0][-1].legend(title="updates", fontsize=7, title_fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def draw_panel(axes: Any, by_width: dict[int, Magnitudes], curve: str) -> None:
    """Draw one panel."""
    steps = len(next(iter(by_width.values()))[curve])
    for step in range(steps):
        shade = str(0.75 - 0.75 * step / max(steps - 1, 1))
        axes.plot(
            list(by_width),
            [magnitudes[curve][step] for magnitudes in by_width.values()],
            ".-",
            color=shade,
            label=str(step),
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.tick_params(which="both", labelsize=7)
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    sys.exit(main())
