"""Pipeline stages on real ranks (gloo): jobs have the losses, norms, evaluations and checkpoints of one process, bit for bit.

A tied weight is the exception: its two gradients are added up in another order.
"""

import json
from pathlib import Path

import pytest
import torch
import yaml

from octet.api_schemas.levels import LEVELS
from octet.worker.fp8.loss_scaling import STATE_BUFFER
from tests.kit.text import write_corpus
from tests.worker.parallel.pipeline_runs import (
    GPT,
    LLAMA,
    MODELS,
    STEPS,
    Jobs,
    Result,
    check_skipped,
    document,
    precision,
    saved,
)
from tests.worker.parallel.test_kills import undisturbed

TIED_LOSS_TOLERANCE = 2e-3
"""Relative, after three steps at a level whose gradients are in FP8: a sum of another last bit may round to another code."""
FAST = [("llama", "O3", "interleaved"), ("gpt", "O2", "1f1b")]
EXAMPLE = Path(__file__).parents[3] / "examples" / "gpt-pipeline.yaml"
STAGED_LEVELS = [name for name, level in LEVELS.items() if level.engine != "torchao"]
CASES = [
    *[("llama", level, schedule) for level in (*STAGED_LEVELS, "delayed") for schedule in ("1f1b", "interleaved")],
    *[("gpt", level, "1f1b") for level in ("fp32", "O2", "O3-split", "fp16-amp")],
]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    torch.set_num_threads(1)
    return Jobs(tmp_path_factory.mktemp("staged"))


def staged(jobs: Jobs, family: str, level: str, schedule: str) -> tuple[str, list[Result]]:
    """The job of two stages: its name, and what each rank found."""
    name = f"{family} {level} {schedule}"
    if name not in jobs.found:
        jobs.run({name: document(jobs.corpus, MODELS[family], precision(level), 2, pipeline=2, schedule=schedule)}, 2)
    return name, jobs.found[name]


@pytest.mark.system
@pytest.mark.parametrize(
    ("family", "level", "schedule"), [pytest.param(*case, marks=[] if case in FAST else pytest.mark.matrix) for case in CASES]
)
def test_stages_train_as_one_process_does(jobs: Jobs, family: str, level: str, schedule: str) -> None:
    """To the bit: losses, norms, evaluation, and every tensor of the checkpoint."""
    alone, expected = jobs.alone(family, level)
    name, [first, last] = staged(jobs, family, level, schedule)
    assert first["num_parameters"] == expected["num_parameters"]
    assert set(first["names"]) | set(last["names"]) == set(expected["names"])
    assert set(first["names"]) & set(last["names"]) <= {STATE_BUFFER}
    assert (first["evaluation"], first["num_parameters"]) == (last["evaluation"], last["num_parameters"])
    if family == "gpt":
        assert first["losses"] == pytest.approx(expected["losses"], rel=TIED_LOSS_TOLERANCE)
        assert first["evaluation"][0] == pytest.approx(expected["evaluation"][0], rel=TIED_LOSS_TOLERANCE)
        tensors = saved(jobs.folder / name)
        assert torch.equal(tensors["/model/token_embedding.weight"], tensors["/model/head.weight"])
        return
    assert (first["losses"], first["norms"]) == (expected["losses"], expected["norms"])
    assert first["evaluation"] == expected["evaluation"]
    assert jobs.differences(name, alone) == []


def test_hidden_states_and_their_gradients_travel(jobs: Jobs) -> None:
    """Two stages for each rank: three borders. The first rank sends over two of them forward and over one backward."""
    _, [first, last] = staged(jobs, *FAST[0])
    micro_batch, evaluation = 2 * 16 * 64 * 4, 8 * 16 * 64 * 4
    assert first["sent"]["send"] == {"float32": STEPS * 4 * 3 * micro_batch + 2 * 2 * evaluation}
    assert last["sent"]["send"] == {"float32": STEPS * 4 * 3 * micro_batch + 2 * 1 * evaluation}


def test_a_checkpoint_is_read_by_the_same_stages_to_the_bit_and_by_one_process(jobs: Jobs) -> None:
    family, level, schedule = FAST[0]
    name, _ = staged(jobs, family, level, schedule)
    alone, expected = jobs.alone(family, level)
    staged_job = document(jobs.corpus, LLAMA, precision(level), 2, pipeline=2, schedule=schedule)
    jobs.check_resumed(staged_job, name, 2)
    to_one = jobs.resume(document(jobs.corpus, LLAMA, precision(level)), "to one", name, 1)
    assert to_one["losses"] == expected["losses"][-1:]
    assert jobs.differences("to one", alone) == []


@pytest.mark.matrix
@pytest.mark.parametrize("level", ["fp32", "O2", "O3-split"])
def test_stages_read_the_checkpoints_of_other_layouts(jobs: Jobs, level: str) -> None:
    alone, expected = jobs.alone("llama", level)
    one_run = document(jobs.corpus, LLAMA, precision(level), 2, pipeline=2)
    two_runs = document(jobs.corpus, LLAMA, precision(level), 2, pipeline=2, schedule="interleaved")
    name, _ = staged(jobs, "llama", level, "interleaved")
    assert jobs.resume(one_run, f"from one {level}", alone, 2)["losses"] == expected["losses"][-1:]
    assert jobs.resume(one_run, f"from interleaved {level}", name, 2)["losses"] == expected["losses"][-1:]
    assert jobs.resume(two_runs, f"to interleaved {level}", alone, 2)["losses"] == expected["losses"][-1:]
    for resumed in (f"from one {level}", f"from interleaved {level}", f"to interleaved {level}"):
        assert jobs.differences(resumed, alone) == []


@pytest.mark.matrix
@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("level", ["fp32", "te", "O2", "O3", "O3-split"])
def test_stages_with_data_ranks_train_as_data_ranks_alone(jobs: Jobs, level: str, zero_stage: int) -> None:
    """Two stages of two data ranks each against two data ranks, at the same stage of ZeRO, and resumed."""
    data, both = f"data {level} {zero_stage}", f"both {level} {zero_stage}"
    jobs.run({data: document(jobs.corpus, LLAMA, precision(level), 2, zero_stage=zero_stage)}, 2)
    job = document(jobs.corpus, LLAMA, precision(level), 4, pipeline=2, zero_stage=zero_stage)
    jobs.run({both: job}, 4)
    ranks, [expected, _] = jobs.found[both], jobs.found[data]
    assert (ranks[0]["losses"], ranks[0]["norms"]) == (expected["losses"], expected["norms"])
    assert all(rank["evaluation"] == expected["evaluation"] for rank in ranks)
    assert jobs.differences(both, data) == []
    jobs.check_resumed(job, both, 4)


@pytest.mark.matrix
@pytest.mark.parametrize(("num_ranks", "zero_stage"), [(2, 0), (4, 1)])
def test_a_nan_in_one_stage_makes_all_ranks_skip(jobs: Jobs, num_ranks: int, zero_stage: int) -> None:
    name = f"poisoned {num_ranks}"
    job = document(jobs.corpus, LLAMA, {"level": "O3"}, num_ranks, pipeline=2, zero_stage=zero_stage)
    jobs.run({name: job}, num_ranks)
    check_skipped(jobs.found[name])


@pytest.mark.matrix
def test_the_example_trains_as_under_torchrun(tmp_path: Path) -> None:
    """`octet.worker.rank.main` on four ranks, with the job file that users have."""
    job = yaml.safe_load(EXAMPLE.read_text())
    job["data"]["path"] = str(write_corpus(tmp_path / "corpus"))
    job["training"].update(steps=2, sequence_length=32, eval_every=0, eval_batches=1, checkpoint_every=0, schedule={})
    losses = undisturbed(tmp_path / "run", job | {"model": GPT | {"max_sequence_length": 32}})
    assert list(losses) == [1, 2]
    summary = json.loads((tmp_path / "run" / "run" / "summary.json").read_text())
    assert summary["sent_bytes"]["send"]["float32"] > 0
    tensors = saved(tmp_path / "run" / "run")
    assert torch.equal(tensors["/model/token_embedding.weight"], tensors["/model/head.weight"])
