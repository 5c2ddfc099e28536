"""What only one place may do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


DEVICE_MODULES = ("megatron/device.py", "tds/device.py")  # tds must run without megatron
DEVICE_CALLS = tuple(f"torch.{name}" for name in "cuda accelerator Event Stream xpu mps npu".split()) + (".is_cuda",)


def test_only_device_modules_call_accelerator_api() -> None:
    files = [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "tds").rglob("*.py"), *ROOT.glob("pretrain_*.py")]
    offenders = [
        f"{path.relative_to(ROOT)}:{line_number}"
        for path in sorted(files)
        if path.relative_to(ROOT).as_posix() not in DEVICE_MODULES
        for line_number, line in enumerate(path.read_text().splitlines(), 1)
        if any(call in line for call in DEVICE_CALLS)
    ]
    assert offenders == []
    for module in DEVICE_MODULES:
        assert "torch.accelerator" in (ROOT / module).read_text(), "the seam itself must be seen by this search"


def test_script_help_imports_neither_torch_nor_deepspeed() -> None:
    program = (
        "import runpy, sys; sys.argv = ['pretrain_gpt2.py', '--help']\n"
        "try: runpy.run_path('pretrain_gpt2.py', run_name='__main__')\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'deepspeed'}))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr
