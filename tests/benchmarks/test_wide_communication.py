"""The benchmark of gradients sent in bf16 runs over real ranks, and its interval is Student's."""

import sys
from pathlib import Path

import pytest

from benchmarks import wide_communication


def test_the_interval_is_that_of_five_paired_gaps() -> None:
    """Gaps of 1 to 5 %: mean 3, standard deviation 1.5811, times 2.776 over the root of 5."""
    assert wide_communication.gaps([1.01, 1.02, 1.03, 1.04, 1.05], [1.0] * 5) == "+3.000 ± 1.963"


@pytest.mark.matrix
def test_it_writes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--levels", "bf16-amp", "--steps", "10", "--seeds", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["wide_communication", *options])
    wide_communication.main()
    [report] = tmp_path.iterdir()
    [row] = [line for line in report.read_text().splitlines() if line.startswith("| bf16-amp |")]
    assert "±" in row
