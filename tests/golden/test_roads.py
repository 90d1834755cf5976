"""The numbers of every level, on every road, equal those of roads.json, bit for bit.

All of it: `python -m pytest tests/golden -m "matrix or system or not matrix"`.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from octet.worker.common.config import RankEnv
from tests.golden import roads
from tests.golden.runs import LEVEL_RUNS, Run, all_runs
from tests.golden.test_golden import ON_ANOTHER_MACHINE
from tests.kit.text import write_corpus

Result = dict[str, Any]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # raised by Dynamo itself
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # Dynamo reads inputs
    pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),  # a norm that Dynamo traces
]

MARKS = {
    **dict.fromkeys(
        [
            Run("te", "accelerator", 1),
            Run("O3-split", "accelerator", 1),
            Run("O2, llama", "accelerator", 1),
            Run("O2, block", "accelerator", 1),
        ],
        (),
    ),
    Run("O2", "compiled", 1): pytest.mark.system,
}
"""In every run: a delayed window, both ways of holding a weight, gates and scales of blocks; the rest is in the matrix."""
BITS = ("losses", "gradient_norms", "evaluations", "model", "optimizer", "checkpoint")
FACTS = ("memory_bytes", "sent_bytes", "events")


def chosen(num_ranks: int) -> list[Any]:
    """Return the runs on so many ranks, as parameters of a test."""
    runs = [run for run in all_runs() if run.num_ranks == num_ranks]
    return [pytest.param(run, id=str(run), marks=MARKS.get(run, pytest.mark.matrix)) for run in runs]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def golden() -> Result:
    found: Result = json.loads(roads.ROADS.read_text())
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("roads") / "corpus")


@pytest.fixture(scope="module")
def on_this_machine(golden: Result) -> bool:
    """Return whether this processor computes the last bits of the recorded one."""
    return roads.machine() == golden["machine"]


@pytest.fixture(scope="module")
def together(corpus: Path, request: pytest.FixtureRequest) -> Callable[[], list[dict[str, Result]]]:
    """Return a function that trains all selected runs on two ranks, once."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    runs = [item.callspec.params["run"] for item in tests if item.function is test_two_ranks]
    return cache(lambda: roads.train_on_two_ranks(runs, corpus, corpus.parent))


def by_demotion(events: list[str]) -> tuple[list[str], list[str]]:
    """Return the events of demoted layers, and all others."""
    demoted = [event for event in events if event.startswith("layer.demoted ")]
    return demoted, [event for event in events if event not in demoted]


def assert_as_recorded(got: Result, expected: Result, *, on_this_machine: bool) -> None:
    """Compare bits where the machine is the recorded one, else losses; and never more ops than recorded."""
    if on_this_machine:
        assert {name: got.get(name) for name in (*BITS, *FACTS)} == {name: expected.get(name) for name in (*BITS, *FACTS)}
    else:
        assert got["losses"] == pytest.approx(expected["losses"], rel=ON_ANOTHER_MACHINE)
        assert got["memory_bytes"] == expected["memory_bytes"]
    (demoted, others), (expected_demoted, expected_others) = map(by_demotion, (got["events"], expected["events"]))
    assert others == expected_others
    if demoted != expected_demoted:  # the last bits of another machine demote another layer, which takes other ops
        assert not on_this_machine
        return
    for step, ops in expected["ops"].items():
        found = got["ops"][step]
        assert sum(found["ours"].values()) <= sum(ops["ours"].values()), (step, found["ours"], ops["ours"])
        assert found["torch"] <= ops["torch"], step


@pytest.mark.parametrize("run", chosen(1))
def test_one_rank(golden: Result, corpus: Path, on_this_machine: bool, run: Run) -> None:
    found = roads.train(run, RankEnv(), corpus, corpus.parent)
    assert_as_recorded(found, golden["runs"][str(run)], on_this_machine=on_this_machine)


@pytest.mark.parametrize("run", chosen(2))
def test_two_ranks(golden: Result, together: Callable[[], list[dict[str, Result]]], on_this_machine: bool, run: Run) -> None:
    first, second = (results[str(run)] for results in together())
    assert_as_recorded(first, golden["runs"][str(run)], on_this_machine=on_this_machine)
    if run.name in LEVEL_RUNS:  # whose ranks hold the same
        assert {name: first[name] for name in ("model", "optimizer")} == {name: second[name] for name in ("model", "optimizer")}


def test_all_runs_are_recorded(golden: Result) -> None:
    assert set(golden["runs"]) == {str(run) for run in all_runs()}
