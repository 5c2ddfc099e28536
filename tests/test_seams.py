"""What only one place may do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_only_device_py_calls_the_device() -> None:
    calls = ("torch.cuda", "torch.accelerator", "torch.xpu", "torch.mps", "torch.npu")
    guilty = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*sorted((ROOT / "megatron").rglob("*.py")), ROOT / "pretrain_gpt2.py"]
        if path != ROOT / "megatron" / "device.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if any(call in line for call in calls)
    ]
    assert guilty == []


def test_help_of_the_script_imports_neither_torch_nor_deepspeed() -> None:
    program = (
        "import runpy, sys; sys.argv = ['pretrain_gpt2.py', '--help']\n"
        "try: runpy.run_path('pretrain_gpt2.py', run_name='__main__')\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'deepspeed', 'tds'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
