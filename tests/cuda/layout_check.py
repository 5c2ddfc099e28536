"""Run the layout check of a run with ``--device cuda`` in a process with the simulated device; print the result.

    DS_ACCELERATOR=cuda python -m tests.cuda.layout_check --model-parallel-size 2 --bf16

The process selects the device and imports DeepSpeed for it, as a run does before it starts the check. Real tensors
cannot be allocated on the simulated device, so a check that used it would fail. The last line of the output is the
result as JSON, together with the device type and the number of child processes that remain.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.cuda import fake_cuda

WORLD_SIZE = 2
SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 1000 --data-path none --eval-iters 0"


def main(flags: list[str]) -> None:
    library = fake_cuda.load()  # before torch is imported
    from tests.cuda import torch_cuda

    library.set_guard()
    torch_cuda.install()
    from megatron.config import parse
    from megatron.training.device_setup import configure_device
    from megatron.training.programs import decoder
    from megatron.training.proof.start import start_layout_check

    argv = [*SIZES.split(), "--device", "cuda", "--prove", *flags]
    config = parse(argv, world_size=WORLD_SIZE, env={}, accepts_model=True)
    device_type = configure_device(config)
    import megatron.training.setup  # noqa: F401 - imports DeepSpeed, as a run does before the check

    providers = decoder.train_valid_test_datasets_provider, decoder.model_provider, decoder.forward_step
    callback = start_layout_check(config, WORLD_SIZE, device_type, *providers)
    assert callback is not None and callback.process is not None
    result = callback.process.wait()
    callback.close()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    sys.stdout.write("\n" + json.dumps([device_type, len(children), result.to_dict()]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
