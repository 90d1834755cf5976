"""Stages whose layers tensor ranks divide, on real ranks (gloo): jobs have the bits of tensor ranks alone.

Against one process they have the tolerances of tensor ranks, whose partial sums differ in the last bit (`tensor_runs.py`).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas.levels import LEVELS
from octet.worker.common.config import RankEnv
from tests.kit.text import write_corpus
from tests.worker.parallel.compare import GRADIENT_ERROR
from tests.worker.parallel.pipeline_runs import (
    LLAMA,
    MODELS,
    STEPS,
    Jobs,
    Result,
    check_skipped,
    document,
    gradients,
    precision,
    saved,
)
from tests.worker.parallel.tensor_runs import LOSS_TOLERANCE, NORM_TOLERANCE
from tests.worker.parallel.test_kills import undisturbed

pytestmark = pytest.mark.system

DIVIDED_LEVELS = [name for name, level in LEVELS.items() if not level.loss_scaling and level.engine == "octet"]
Case = tuple[str, str, str, bool]
"""Family, level, schedule, and whether tensor ranks divide tokens."""
FAST: Case = ("llama", "O3", "interleaved", True)
CASES: list[Case] = [
    *[("llama", level, "interleaved", True) for level in (*DIVIDED_LEVELS, "delayed")],
    *[("llama", level, "1f1b", False) for level in ("fp32", "bf16-amp", "O2", "O3-split", "delayed")],
    *[("gpt", level, "1f1b", sequence) for level in ("fp32", "O2", "O3-split") for sequence in (False, True)],
]
ZERO_STAGES = (0, 1)


def job(jobs: Jobs, case: Case, num_ranks: int = 4, **parallelism: Any) -> dict[str, Any]:
    """A job of two stages that two tensor ranks divide each."""
    family, level, schedule, sequence = case
    degrees = {"pipeline": 2, "schedule": schedule, "tensor": 2, "sequence": sequence} | parallelism
    return document(jobs.corpus, MODELS[family], precision(level), num_ranks, **degrees)


class DividedJobs(Jobs):
    """Jobs of cases; those of one family, schedule and kind run one after the other on the same ranks."""

    selected: tuple[Case, ...] = ()

    def divided(self, case: Case) -> tuple[str, list[Result]]:
        """The job of two stages of two tensor ranks: its name, and what each rank found."""
        alike = [other for other in self.selected if (other[0], *other[2:]) == (case[0], *case[2:])]
        name = self._run({_name(other): job(self, other) for other in (*alike, case)}, _name(case), 4)
        return name, self.found[name]

    def tensor_alone(self, case: Case) -> tuple[str, Result]:
        """The job of two tensor ranks: its name, and what the first one found."""
        alike = [other for other in self.selected if (other[0], *other[2:]) == (case[0], *case[2:])]
        one_stage = {"pipeline": 1, "schedule": "1f1b"}
        jobs = {f"tensor {_name(other)}": job(self, other, 2, **one_stage) for other in (*alike, case)}
        name = self._run(jobs, f"tensor {_name(case)}", 2)
        return name, self.found[name][0]

    def _run(self, jobs: dict[str, dict[str, Any]], wanted: str, num_ranks: int) -> str:
        """Run jobs that have not run, if the wanted one is among them. Returns its name."""
        if wanted not in self.found:
            self.run({name: job for name, job in jobs.items() if name not in self.found}, num_ranks)
        return wanted


def _name(case: Case) -> str:
    return " ".join(map(str, case))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> DividedJobs:
    torch.set_num_threads(1)
    made = DividedJobs(tmp_path_factory.mktemp("divided"))
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    selected = {item.callspec.params["case"] for item in tests if item.function is test_ranks_train_as_one_process_does}
    made.selected = tuple(case for case in CASES if case in selected)
    return made


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case == FAST else pytest.mark.matrix) for case in CASES])
def test_ranks_train_as_one_process_does(jobs: DividedJobs, case: Case) -> None:
    _, ranks = jobs.divided(case)
    _, expected = jobs.alone(*case[:2])
    gemm = LEVELS[case[1].replace("delayed", "te")].gemm
    assert ranks[0]["losses"] == pytest.approx(expected["losses"], rel=LOSS_TOLERANCE[gemm])
    assert ranks[0]["norms"][0] == pytest.approx(expected["norms"][0], rel=NORM_TOLERANCE[gemm])
    assert ranks[0]["evaluation"][0] == pytest.approx(expected["evaluation"][0], rel=LOSS_TOLERANCE[gemm])
    assert all(rank["evaluation"] == ranks[0]["evaluation"] for rank in ranks)
    assert all(rank["num_parameters"] == expected["num_parameters"] for rank in ranks)


def test_each_rank_sends_its_own_tokens_to_the_next_stage(jobs: DividedJobs) -> None:
    """Half of what `test_pipeline.py` counts over three borders."""
    _, ranks = jobs.divided(FAST)
    micro_batch, evaluation = 2 * 16 * 64 * 4 // 2, 8 * 16 * 64 * 4 // 2
    expected = [STEPS * 4 * 3 * micro_batch + 2 * borders * evaluation for borders in (2, 2, 1, 1)]
    assert [rank["sent"]["send"]["float32"] for rank in ranks] == expected


def test_a_checkpoint_is_read_by_the_same_ranks_to_the_bit_and_by_one_process(jobs: DividedJobs) -> None:
    name, ranks = jobs.divided(FAST)
    jobs.check_resumed(job(jobs, FAST), name, 4)
    to_one = jobs.resume(document(jobs.corpus, LLAMA, precision("O3")), "to one", name, 1)
    assert to_one["losses"] == pytest.approx(ranks[0]["losses"][-1:], rel=LOSS_TOLERANCE["fp8"])


@pytest.mark.matrix
@pytest.mark.parametrize("case", [case for case in CASES])
def test_ranks_train_as_tensor_ranks_alone(jobs: DividedJobs, case: Case) -> None:
    """To the bit, apart from a tied weight."""
    name, [first, *_] = jobs.divided(case)
    alone, expected = jobs.tensor_alone(case)
    if case[0] == "gpt":
        tensors = saved(jobs.folder / name)
        assert torch.equal(tensors["/model/token_embedding.weight"], tensors["/model/head.weight"])
        assert first["losses"] == pytest.approx(expected["losses"], rel=LOSS_TOLERANCE[LEVELS[case[1]].gemm])
        return
    assert first["losses"] == expected["losses"]
    assert first["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    assert first["evaluation"] == expected["evaluation"]
    assert jobs.differences(name, alone) == []


@pytest.mark.matrix
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("family", "schedule"), [("gpt", "1f1b"), ("llama", "1f1b"), ("llama", "interleaved")])
def test_gradients_are_those_of_one_process(jobs: DividedJobs, family: str, schedule: str, sequence: bool) -> None:
    name = f"gradients {family} {schedule} {sequence}"
    jobs.run({name: job(jobs, (family, "fp32", schedule, sequence))}, 4)
    whole = gradients(document(jobs.corpus, MODELS[family], precision("fp32")), RankEnv(), jobs.folder / "one")
    for rank in jobs.found[name]:
        for parameter, gradient in rank.items():
            expected = whole.get(parameter, whole["token_embedding.weight"])  # a tied head
            error = (gradient - expected).abs().max() / expected.abs().max()
            assert float(error) < GRADIENT_ERROR, parameter
    held = [set(rank) for rank in jobs.found[name]]
    assert held[0] == held[1]
    assert held[2] == held[3]
    assert set(whole) <= held[0] | held[2]


@pytest.mark.matrix
@pytest.mark.parametrize("level", ["fp32", "O3-split"])
def test_ranks_read_the_checkpoints_of_other_layouts(jobs: DividedJobs, level: str) -> None:
    """Ranks read checkpoints of one process, and of the other schedule, whose stages differ.

    Tensor ranks alone read the checkpoints of these ranks.
    """
    gemm = LEVELS[level].gemm
    interleaved, one_run = (job(jobs, ("llama", level, schedule, False)) for schedule in ("interleaved", "1f1b"))
    alone, expected = jobs.alone("llama", level)
    last = pytest.approx(expected["losses"][-1:], rel=LOSS_TOLERANCE[gemm])
    assert jobs.resume(interleaved, f"from one {level}", alone, 4)["losses"] == last
    name, [first, *_] = jobs.divided(("llama", level, "1f1b", False))
    tensor_alone = job(jobs, ("llama", level, "1f1b", False), 2, pipeline=1)
    for resumed, ranks, to in (("interleaved", 4, interleaved), ("tensor alone", 2, tensor_alone), ("one run", 4, one_run)):
        assert jobs.resume(to, f"to {resumed} {level}", name, ranks)["losses"] == first["losses"][-1:]
        assert jobs.differences(f"to {resumed} {level}", name) == []


@pytest.mark.matrix
@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
def test_ranks_train_with_data_ranks(jobs: DividedJobs, zero_stage: int) -> None:
    """Eight ranks against the same data and tensor ranks without stages, bit for bit, and resumed.

    The eight compute blocks again in the backward pass, which changes no bit.
    """
    case: Case = ("llama", "O3-split", "1f1b", True)
    name, without = f"eight {zero_stage}", f"without stages {zero_stage}"
    jobs.run({without: job(jobs, case, 4, pipeline=1, zero_stage=zero_stage)}, 4)
    of_eight = job(jobs, case, 8, zero_stage=zero_stage)
    of_eight["training"]["activation_checkpointing"] = "full"
    jobs.run({name: of_eight}, 8)
    ranks, [expected, *_] = jobs.found[name], jobs.found[without]
    assert ranks[0]["losses"] == expected["losses"]
    assert ranks[0]["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    assert all(rank["evaluation"] == expected["evaluation"] for rank in ranks)
    assert jobs.differences(name, without) == []
    jobs.check_resumed(of_eight, name, 8)


@pytest.mark.matrix
def test_a_nan_in_one_shard_makes_all_ranks_skip(jobs: DividedJobs) -> None:
    jobs.run({"poisoned": job(jobs, ("llama", "O3", "1f1b", False))}, 4)
    check_skipped(jobs.found["poisoned"])


@pytest.mark.matrix
def test_a_job_trains_as_under_torchrun(tmp_path: Path) -> None:
    """`octet.worker.rank.main` on four ranks."""
    corpus = write_corpus(tmp_path / "corpus")
    degrees = {"pipeline": 2, "tensor": 2, "sequence": True, "zero_stage": 1}
    losses = undisturbed(tmp_path / "run", document(corpus, MODELS["gpt"], precision("O2"), 4, **degrees))
    assert list(losses) == list(range(1, STEPS + 1))
    summary = json.loads((tmp_path / "run" / "run" / "summary.json").read_text())
    assert summary["sent_bytes"]["send"]["float32"] > 0
