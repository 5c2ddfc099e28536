"""What only one place may do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


SEAMS = ("megatron/device.py", "tds/device.py")  # tds must run without megatron
CALLS = tuple(f"torch.{name}" for name in "cuda accelerator Event Stream xpu mps npu".split()) + (".is_cuda",)


def test_only_the_seams_call_the_device() -> None:
    files = [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "tds").rglob("*.py"), *ROOT.glob("pretrain_*.py")]
    guilty = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted(files)
        if path.relative_to(ROOT).as_posix() not in SEAMS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if any(call in line for call in CALLS)
    ]
    assert guilty == []
    for seam in SEAMS:
        assert "torch.accelerator" in (ROOT / seam).read_text(), "the seam itself must be seen by this search"


def test_help_of_the_script_imports_neither_torch_nor_deepspeed() -> None:
    program = (
        "import runpy, sys; sys.argv = ['pretrain_gpt2.py', '--help']\n"
        "try: runpy.run_path('pretrain_gpt2.py', run_name='__main__')\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'deepspeed'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
