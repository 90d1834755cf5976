"""The 11 scripts of Accelerate's FP8 zoo as one suite: each learns as in high precision, and a job is the library's loop.

Accelerate has them under `benchmarks/fp8`, in three folders: single process, DDP, FSDP and DeepSpeed's ZeRO; MS-AMP has no
FSDP. Here all train one small GPT. A loop of one's own (`zoo_runs.py`) calls `initialize`, and `parallelize` where Accelerate
wraps; the job asks `octet.worker.rank.main` for the same.
"""

import statistics
from itertools import chain
from pathlib import Path

import pytest
import torch

from octet.api_schemas.levels import LEVELS
from tests.kit.ranks import run_ranks, saved_by_ranks
from tests.kit.text import write_corpus
from tests.worker.parallel.zoo_runs import NUM_RANKS, NUM_STEPS, Case, Run, both

pytestmark = pytest.mark.system

ZERO = ("ZeRO 1", "ZeRO 2", "ZeRO 3")
SCRIPTS: dict[str, list[Case]] = {
    f"{folder}/{script}": [Case(way, level) for way in ways for level in levels]
    for folder, levels in (("ms_amp", ("O1", "O2", "O3")), ("torchao", ("ao",)), ("transformer_engine", ("te",)))
    for script, ways in (
        ("non_distributed.py", ("single",)),
        ("ddp.py", ("data parallel",)),
        ("fsdp.py", ("fsdp",)),
        ("distrib_deepspeed.py", ZERO),
    )
    if (folder, script) != ("ms_amp", "fsdp.py")
}
USUAL = (Case("single", "O1"), Case("ZeRO 1", "O3"))
"""Cases of `make test`."""
REFERENCE = Case("single", "fp32")
LARGEST_GAP = 0.05
"""Largest relative excess over fp32 of the mean loss in the last half of the steps.

It covers the steps' noise, and is not a claim about accuracy.
"""
FSDP_TOLERANCE = 1e-2
"""torch's AdamW of FSDP2's shards rounds in another order, in fp32; after some steps, codes at level ao differ by it."""
CASES = [
    pytest.param(case, id=f"{script} {case.way} {case.level}", marks=() if case in USUAL else pytest.mark.matrix)
    for script, cases in SCRIPTS.items()
    for case in cases
]
of_each_script = pytest.mark.parametrize("case", CASES)
Results = dict[Case, list[tuple[Run, Run]]]


def work(rank: int, cases: list[Case], folder: str) -> None:
    torch.set_num_threads(1)
    found = {case: both(case, f"{folder}/corpus", rank, Path(folder)) for case in cases}
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    """Return each rank's run in a loop of one's own, and its run of the job, for the selected cases."""
    folder = tmp_path_factory.mktemp("zoo")
    write_corpus(folder / "corpus", num_files=2)
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    chosen = {item.callspec.params["case"] for item in tests if hasattr(item, "callspec")}
    cases = [REFERENCE, *sorted(case for case in chosen if isinstance(case, Case))]
    run_ranks(work, (cases, str(folder)), NUM_RANKS)
    ranks = saved_by_ranks(folder, NUM_RANKS)
    return {case: [rank[case] for rank in ranks[: case.num_ranks]] for case in cases}


def test_the_zoo_is_complete() -> None:
    assert len(SCRIPTS) == 11
    assert len(set(chain(*SCRIPTS.values()))) == len(CASES) == 27


@of_each_script
def test_it_learns_as_in_high_precision(results: Results, case: Case) -> None:
    (own, _), *_ = results[case]
    (reference, _), *_ = results[REFERENCE]
    assert own.losses[-1] < 0.7 * own.losses[0]
    late, expected = (statistics.fmean(run.losses[NUM_STEPS // 2 :]) for run in (own, reference))
    assert late <= (1 + LARGEST_GAP) * expected


@of_each_script
def test_the_job_trains_as_the_loop_does(results: Results, case: Case) -> None:
    """Exactly, but for FSDP, whose job is ZeRO 3."""
    (own, job), *_ = results[case]
    assert len(job.losses) == NUM_STEPS
    if case.way == "fsdp":
        assert own.losses[0] == job.losses[0]
        assert own.losses == pytest.approx(job.losses, rel=FSDP_TOLERANCE)
    else:
        assert own.losses == job.losses


@of_each_script
def test_a_rank_holds_the_bytes_of_its_level(results: Results, case: Case) -> None:
    """The table's bytes per parameter on one rank; divided where ZeRO divides. Windows of amaxes (`other`) are of one size."""
    for own, _ in results[case]:
        per_parameter = (sum(own.converted_bytes.values()) - own.converted_bytes["other"]) / own.num_converted
        whole = LEVELS[case.level].bytes_per_parameter
        weight_and_gradient = sum(own.converted_bytes[kind] for kind in ("weights", "gradients")) / own.num_converted
        assert per_parameter <= 1.02 * whole
        if case.zero_stage:
            states = per_parameter - weight_and_gradient
            assert states <= 0.52 * whole
        if case.zero_stage == 3:
            assert per_parameter <= 0.52 * whole
    own, job = results[case][0]
    if case.way != "fsdp":
        assert own.memory_bytes == job.memory_bytes
        assert own.converted_bytes == job.converted_bytes


@of_each_script
def test_the_job_sends_what_the_loop_sends(results: Results, case: Case) -> None:
    """Gradients to their owners and back in codes where the level has them. An evaluation at ZeRO 3 gathers, too."""
    own, job = results[case][0]
    if case.way in ("single", "fsdp"):
        assert not own.sent
        return
    level, codes, fp32 = LEVELS[case.level], ("exchange", "float8_e4m3fn"), ("exchange", "float32")
    assert own.sent[fp32] == job.sent[fp32]
    assert own.sent.get(codes) == job.sent.get(codes)
    num_passes = 2 if case.zero_stage >= 2 else 1
    if level.gradient_communication == "fp8":
        assert own.sent[codes] == pytest.approx(NUM_STEPS * num_passes * own.num_converted / NUM_RANKS, rel=0.02)
    else:
        assert own.sent[fp32] > NUM_STEPS * num_passes * 4 * own.num_converted / NUM_RANKS
    if case.zero_stage < 3:
        gathered = {key: number for key, number in own.sent.items() if key[0] == "gather" and key[1] != "uint8"}
        assert gathered == {key: number for key, number in job.sent.items() if key[0] == "gather" and key[1] != "uint8"}
