"""Compiled blocks on real ranks (gloo): each is one graph, compiled once, and jobs have the losses of eager blocks."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas import FailureReason
from octet.api_schemas.levels import LEVELS
from tests.kit.ports import free_port
from tests.kit.ranks import PRELOADED, run_ranks
from tests.kit.text import write_corpus
from tests.worker.parallel.compare import DIVIDED_LEVELS
from tests.worker.parallel.compiled_runs import rank_with_bad_compiler, work
from tests.worker.parallel.pipeline_runs import MODELS, Jobs, Result, document, precision

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # raised by Dynamo itself
]
LONG_S = 300.0
PIPELINE, TENSOR = {"pipeline": 2}, {"tensor": 2}
Case = tuple[str, str, str, dict[str, Any], dict[str, Any]]
"""A family, a level, the device that the CPU behaves as, the degrees, and options of the training."""
STAGED = [name for name, level in LEVELS.items() if level.engine != "torchao"]
SAVINGS: list[dict[str, Any]] = [
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
    {"residual_stream": "bf16"},
]
FAST: list[Case] = [
    ("llama", "O2", "cpu", PIPELINE, {}),
    ("gpt", "O2", "cpu", TENSOR, {}),
    *[("llama", "O3", "cpu", degrees, SAVINGS[0]) for degrees in (PIPELINE, TENSOR)],
    ("gpt", "O3", "cpu", {"zero_stage": 3}, {}),
]
OTHERS: list[Case] = [
    *[("llama", level, "cpu", PIPELINE, {}) for level in (*STAGED, "delayed")],
    *[("gpt", level, "cpu", TENSOR, {}) for level in (*DIVIDED_LEVELS, "delayed")],
    *[("llama", "O3", "cpu", degrees, saving) for degrees in (PIPELINE, TENSOR) for saving in SAVINGS],
    *[("gpt", level, "accelerator", degrees, {}) for level in ("te", "O2", "O3-split") for degrees in (PIPELINE, TENSOR)],
    ("llama", "bf16-amp", "accelerator", PIPELINE, {}),
    ("llama", "O3-split", "cpu", {"pipeline": 2, "schedule": "interleaved"}, {}),
    ("llama", "O2", "accelerator", {"pipeline": 2, "schedule": "interleaved"}, SAVINGS[0]),
    ("llama", "O3", "cpu", {"pipeline": 2, "zero_stage": 1, "workers": 4}, {}),
    ("llama", "O2", "cpu", {"pipeline": 2, "tensor": 2, "workers": 4}, {}),
    *[("gpt", level, "cpu", {"tensor": 2, "zero_stage": 3, "workers": 4}, {}) for level in ("te", "O3")],
    *[("gpt", level, "accelerator", {}, {}) for level in ("te", "O2", "O3-split")],
    *[("gpt", level, "cpu", {"zero_stage": 3}, {}) for level in ("te", "O2", "O3-split", "bf16-amp")],
]
CASES = [*FAST, *(case for case in OTHERS if case not in FAST)]
ACCELERATOR_TOLERANCE = 1e-3
"""Relative. Norms of eager blocks run as one kernel there, also on one process: a last bit may round to another code."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("compiled"))


def trained(jobs: Jobs, case: Case) -> list[tuple[Result, Result]]:
    """Run a job with eager blocks, and again with compiled ones. Return both results of each rank.

    The job has five steps with an evaluation between them. Statistics are sampled in every other step.
    """
    family, level, device, degrees, options = case
    parallelism = {name: value for name, value in degrees.items() if name != "workers"}
    of_level = precision(level) | ({"statistics_every": 2} if level == "delayed" or LEVELS[level].has_own_fp8 else {})
    job = document(jobs.corpus, MODELS[family], of_level, degrees.get("workers", 2), **parallelism)
    names = {compiling: f"{device} {compiling} {CASES.index(case)}" for compiling in ("off", "on")}
    for compiling, name in names.items():
        job["training"] |= {"steps": 5, "eval_every": 3, "checkpoint_every": 0, "compile": compiling, **options}
        (jobs.folder / f"{name}.json").write_text(json.dumps(job))
    num_ranks = job["resources"]["workers"]
    run_ranks(work, (str(jobs.folder), list(names.values())), num_ranks)
    found = [torch.load(jobs.folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]
    return [(of_rank[names["off"]], of_rank[names["on"]]) for of_rank in found]


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.system) for case in FAST),
        *(pytest.param(case, marks=pytest.mark.matrix) for case in CASES if case not in FAST),
    ],
    ids=str,
)
def test_blocks_are_compiled_once_and_train_as_eager_ones(jobs: Jobs, case: Case) -> None:
    """A graph for sampled steps and one for others; a rank's first block may have its own where hidden states are in bf16."""
    num_kinds = 1 + (case[1] == "delayed" or LEVELS[case[1]].has_own_fp8)
    for rank, (expected, found) in enumerate(trained(jobs, case)):
        assert expected["graphs"] == 0
        assert found["breaks"] == {}
        assert found["events"] == ["training.compiled"], rank
        num_most = num_kinds * (2 if case[4].get("residual_stream") == "bf16" else 1)
        assert num_kinds <= found["graphs"] <= num_most, rank
        assert _without_reports(found["sent"]) == _without_reports(expected["sent"])
        for name in ("losses", "norms"):
            is_exact = case[2] == "cpu"
            equal = expected[name] if is_exact else pytest.approx(expected[name], rel=ACCELERATOR_TOLERANCE)
            assert found[name] == equal, (rank, name)


def _without_reports(sent: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return counted bytes without the sums of losses: how many steps a report holds depends on the time that they take."""
    return {kind: {dtype: num for dtype, num in of.items() if (kind, dtype) != ("sum", "float64")} for kind, of in sent.items()}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("story", "timeout_s", "reason", "says"),
    [
        ("fails", 120.0, FailureReason.WORKER_ERROR, "rank 1 of 2: BackendCompilerFailed: "),
        ("hangs", 20.0, FailureReason.STALLED, "rank 1 of 2 takes no part, after step 0. rank 0: in "),
    ],
)
@pytest.mark.parametrize("degrees", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
def test_a_rank_whose_compiler_is_bad_is_named(
    tmp_path: Path, degrees: dict[str, Any], story: str, timeout_s: float, reason: FailureReason, says: str
) -> None:
    job = document(write_corpus(tmp_path / "corpus"), MODELS["gpt"], {"level": "fp32"}, 2, **degrees)
    job["training"]["compile"] = "on"
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    arguments = story, job, free_port(), str(tmp_path), timeout_s
    ranks = [context.Process(target=rank_with_bad_compiler, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    ranks[0].join(LONG_S)
    for process in ranks:
        process.kill()
        process.join()
    kind, found, message = json.loads((tmp_path / "0.json").read_text())
    assert (kind, found) == ("RanksFailed", reason)
    assert message.startswith(says), message
