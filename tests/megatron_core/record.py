"""Record the values of megatron-core that the tests without the package read.

    python -m tests.megatron_core.record

Run it after a change of the cases, with the package installed, and look at the differences.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.megatron_core import test_rates, test_training


def main() -> None:
    """Write ``recorded_rates.json`` and ``recorded_training.json``."""
    with tempfile.TemporaryDirectory(prefix="megatron-core-") as name:
        folder, cases = Path(name), test_training.RECORDED_CASES
        rates = test_rates.compute_core_rates(folder)[: test_rates.NUM_RECORDED]
        test_training.run_core(folder, [(case, 1, "fp64") for case in cases])
        values = {
            case: test_training.record(test_training.CASES[case], test_training.read_core(folder, case, 1, "fp64"))
            for case in cases
        }
    test_rates.RECORDED.write_text(json.dumps(rates) + "\n")
    test_training.RECORDED.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
