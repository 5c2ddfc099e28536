"""Print the kernels of layers and of the loss: ``python -m tests.cuda [llama-7b] [loss] ...``, by default all cases."""

from __future__ import annotations

import sys

from tests.cuda import fake_cuda
from tests.cuda.worker import CostCase


def main(names: list[str]) -> None:
    library = fake_cuda.load()  # before torch is imported
    from tests.cuda import fused_operators, layer_cost, torch_cuda

    library.set_guard()
    torch_cuda.install()
    fused_operators.install()
    for name in names or [*layer_cost.SHAPES, "loss"]:
        print(name, *layer_cost.table_lines(layer_cost.measure(library, CostCase(name))), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
