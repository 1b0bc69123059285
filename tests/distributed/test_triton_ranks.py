"""The Triton kernels in Triton's interpreter on 1, 2 and 4 ranks: training steps against the reference."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install 'spurline[triton]'")

# In a process of its own: Triton decides when it is imported whether kernels are interpreted.
SCRIPT = """
import json
from spurline.testing.verification.cells import TINY_MODEL
from spurline.testing.verification.matrix import QUICK
from spurline.testing.verification.run import Verifier
cells = [cell for cell in QUICK if cell.experts == "triton"]
for outcome in Verifier(TINY_MODEL).run(cells):
    error = outcome.findings["gradient"][0].error if outcome.findings else None
    print(json.dumps([outcome.cell.ranks, outcome.cell.dtype, outcome.problems(), error]))
"""


@pytest.mark.slow
def test_steps_on_ranks_equal_the_reference() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert [problems for _, _, problems, _ in outcomes] == [[]] * len(outcomes)
    assert {ranks for ranks, *_ in outcomes} == {1, 2, 4}
    assert all(error < 1e-5 for _, dtype, _, error in outcomes if dtype == "float32")
