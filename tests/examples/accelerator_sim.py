"""A process of its own for the simulated device: torch wants it made ready before the first backward of a process.

    python -m tests.examples.accelerator_sim FOLDER NAME=RANKS:FLAGS ...

trains one run after another in forked ranks, each into FOLDER/NAME, and then runs tools/check_accelerator.py; writes
FOLDER/result.json.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from tests.helpers.runs import ROOT, launch_script, make_flags, write_corpus

PLUGIN = ROOT / "examples" / "accelerator_sim"


def main() -> None:
    import megatron_accelerator_sim  # noqa: F401 - the one line that registers it

    import megatron.training.setup  # noqa: F401 - imported once for all ranks
    from megatron.models.common import norms
    from megatron.mpu import embedding_lookup
    from tools import check_accelerator

    # On a CPU these accumulate in fp32. The simulated device runs torch's own kernels, so both must here.
    embedding_lookup.HALF_PRECISION = norms.HALF_PRECISION = ()

    folder = Path(sys.argv[1])
    corpus = folder / "texts" if (folder / "texts.idx").exists() else write_corpus(folder)
    codes = {}
    for run in sys.argv[2:]:
        name, _, run_spec = run.partition("=")
        ranks, _, extra = run_spec.partition(":")
        argv = make_flags(corpus, folder / name, extra)
        device_idx = argv.index("--device")  # that of all tests; the other one is of this run
        codes[name] = launch_script(int(ranks), argv[:device_idx] + argv[device_idx + 2 :], folder / f"{name}.log")
    table = StringIO()
    with redirect_stdout(table):
        check_exit_code = check_accelerator.main(["--device", "sim"])
    result = {"codes": codes, "checked": check_exit_code, "table": table.getvalue()}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
