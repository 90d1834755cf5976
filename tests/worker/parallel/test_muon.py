"""Muon over two real ranks (gloo): the bits of one process at every ZeRO stage, and checkpoints at any number of ranks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from octet.api_schemas import CheckpointRef, JobSpec, Layout
from octet.worker import checkpoint
from octet.worker.checkpoint.resume import resume
from octet.worker.common.config import RankEnv, resolve
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.mesh import Axis, Mesh
from octet.worker.optim import LowBitMuon, MuonHyperparameters, muon_groups
from octet.worker.train.loop import Trainer
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks
from tests.kit.text import write_corpus
from tests.kit.training import Recorder
from tests.worker.parallel.pipeline_runs import GPT
from tests.worker.parallel.reference import (
    STEPS,
    DeepNet,
    Net,
    Result,
    loss_of,
    make,
    parallel_on,
    reference,
    state_of,
    step_on_ranks,
)

pytestmark = pytest.mark.system

CASES = [("fp32", 0), ("fp32", 1), ("te", 1), ("O2", 1), ("O3", 1), ("O3-split-8bit", 2), ("O2", 3), ("O3-split", 3)]
"""A level and a stage: each way of holding a weight and a momentum in shares, and stages 0 to 3."""


def muon(net: nn.Module) -> torch.optim.Optimizer:
    return LowBitMuon(muon_groups(net), MuonHyperparameters(lr=0.01))


def net_of(stage: int) -> type[nn.Module]:
    return DeepNet if stage == 3 else Net


def trained(axis: Axis, level: str, stage: int) -> Result:
    parallel = parallel_on(axis, level, stage, net_of(stage), muon)
    losses = []
    for step in range(STEPS):
        losses.append(step_on_ranks(parallel, step))
        parallel.optimizer.zero_grad()
    momentum = sum(
        parallel.optimizer.state[held]["exp_avg"]["codes"].numel()
        for group in parallel.optimizer.param_groups
        for held in group["params"]
        if group["use_muon"] and parallel.optimizer.state[held]
    )
    return {"losses": losses, "state": state_of(parallel.model, parallel.optimizer), "momentum": momentum}


def used_by_one_step(axis: Axis) -> str:
    """The state after a step of all matrices, and one in which no rank has a gradient of one of them."""
    parallel = parallel_on(axis, "O2", 1, Net, muon)
    for step in range(2):
        loss = loss_of(parallel.model, axis.rank, step, 0)
        (loss if step else loss + parallel.model.unused(torch.ones(1, 64)).sum()).backward()
        parallel.synchronize()
        parallel.optimizer.step()
        parallel.publish()
        parallel.optimizer.zero_grad()
    steps = {name: int(state["step"]) for name, state in named_states(parallel.model, parallel.optimizer.state_dict()).items()}
    assert (steps["unused.weight"], steps["inner.0.weight"]) == (1, 2)
    return state_of(parallel.model, parallel.optimizer)


def named_states(model: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The states by the parameters' names: groups hold them in the order of `muon_groups`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    ordered = [names[parameter] for group in muon_groups(model) for parameter in group["params"]]
    return {ordered[number]: state for number, state in state_dict["state"].items()}


def resumed(axis: Axis, level: str) -> dict[str, bool]:
    """A run that is saved halfway: resumed by as many ranks, and loaded as whole by one process and in pieces again."""
    begun = parallel_on(axis, level, 1, Net, muon)
    step_on_ranks(begun, 0)
    begun.optimizer.zero_grad()
    saved = copy.deepcopy({"model": exact_state_dict(begun.model), "optimizer": begun.optimizer.state_dict()})
    before = state_of(begun.model, begun.optimizer)
    step_on_ranks(begun, 1)
    begun.optimizer.zero_grad()
    again = parallel_on(axis, level, 1, Net, muon)
    resume(again.model, again.optimizer, copy.deepcopy(saved["model"]), copy.deepcopy(saved["optimizer"]))
    step_on_ranks(again, 1)
    again.optimizer.zero_grad()
    model, optimizer = make(level, 0, 1, Net, muon)
    resume(model, optimizer, saved["model"], saved["optimizer"])
    return {
        "to the bit": state_of(again.model, again.optimizer) == state_of(begun.model, begun.optimizer),
        "on one process": state_of(model, optimizer) == before,
    }


def job(corpus: str, workers: int, **parts: Any) -> JobSpec:
    """Without a clip, whose norm stages sum in another order; a rank has four micro-batches."""
    training = {"steps": 4, "global_batch_size": 8, "sequence_length": 16, "checkpoint_every": 2, "gradient_clip": None}
    training |= {"micro_batch_size": 2 // workers, "optimizer": {"name": "muon", "learning_rate": 3e-3}, "eval_batches": 1}
    document = {"name": "muon", "model": GPT, "precision": {"level": "O2"}, "data": {"path": corpus}, "training": training}
    return JobSpec.model_validate(document | {"resources": {"workers": workers}} | parts)


def losses_of(spec: JobSpec, env: RankEnv, folder: Path, checkpoints: tuple[CheckpointRef, ...] = ()) -> list[float]:
    recorder, config = Recorder(), resolve(spec, env)
    with Mesh(env, torch.device("cpu"), config.layout) as mesh:
        Trainer(config, mesh, recorder, folder).run(checkpoints)
    return recorder.losses()


def jobs(rank: int, ports: list[int], folder: Path, corpus: str) -> dict[str, list[float]]:
    found = {}
    layouts: dict[str, dict[str, Any]] = {"plain": {}, "zero 1": {"zero_stage": 1}, "pipeline": {"pipeline": 2}}
    for port, (name, parallelism) in zip(ports, layouts.items(), strict=False):
        parts: dict[str, Any] = {"parallelism": parallelism}
        if name == "pipeline":
            parts |= {"training": job(corpus, 1).training.model_dump() | {"micro_batch_size": 2}}
        env = RankEnv(rank=rank, world_size=2, master_port=port)
        found[name] = losses_of(job(corpus, 2, **parts), env, folder / name)
    refs = tuple(ref for ref in checkpoint.complete_in(folder / "zero 1" / "checkpoints") if ref.step == 2)
    env = RankEnv(rank=rank, world_size=2, master_port=ports[-1])
    found["zero 1 resumed"] = losses_of(job(corpus, 2, parallelism={"zero_stage": 1}), env, folder / "zero 1", refs)
    return found


def work(rank: int, ports: list[int], folder: str, corpus: str) -> None:
    torch.set_num_threads(1)
    with Mesh(RankEnv(rank=rank, world_size=2, master_port=ports[0]), torch.device("cpu"), Layout(2)) as mesh:
        found: Result = {case: trained(mesh.data, *case) for case in CASES}
        found["used by one step"] = used_by_one_step(mesh.data)
        found["resumed"] = {level: resumed(mesh.data, level) for level in ("O2", "O3")}
    found["jobs"] = jobs(rank, ports[1:], Path(folder), corpus)
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    folder = tmp_path_factory.mktemp("muon")
    corpus = write_corpus(folder / "corpus")
    run_ranks(work, ([free_port() for _ in range(5)], str(folder), str(corpus)), 2)
    return [result | {"corpus": corpus, "folder": folder} for result in saved_by_ranks(folder, 2)]


@pytest.mark.parametrize(("level", "stage"), CASES)
def test_ranks_train_to_the_bits_of_one_process(results: list[Result], level: str, stage: int) -> None:
    torch.set_num_threads(1)
    ranks = [result[level, stage] for result in results]
    expected = reference(level, stage, 2, net_of(stage), muon)
    assert [rank["losses"] for rank in ranks] == expected["losses"]
    assert {rank["state"] for rank in ranks} == {expected["state"]}


def test_ranks_divide_the_momentum(results: list[Result]) -> None:
    whole = results[0]["fp32", 0]["momentum"]
    shares = [result["fp32", 1]["momentum"] for result in results]
    assert sum(shares) == whole
    assert 0.3 * whole < min(shares)


def test_ranks_agree_on_matrices_without_a_gradient(results: list[Result]) -> None:
    assert len({result["used by one step"] for result in results}) == 1


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_checkpoint_continues_on_ranks_and_on_one_process(results: list[Result], level: str) -> None:
    assert [result["resumed"][level] for result in results] == [{"to the bit": True, "on one process": True}] * 2


class TestJobs:
    def test_zero_has_the_bits_of_data_ranks(self, results: list[Result]) -> None:
        """The first rank alone reports. A resumed optimizer has other group objects than ZeRO was set up with."""
        jobs = results[0]["jobs"]
        losses = jobs["plain"]
        assert jobs["zero 1"] == losses
        assert jobs["zero 1 resumed"] == losses[2:]
        assert losses[-1] < losses[0]

    def test_a_pipeline_has_the_bits_of_one_process(self, results: list[Result]) -> None:
        torch.set_num_threads(1)
        expected = losses_of(job(str(results[0]["corpus"]), 1), RankEnv(), results[0]["folder"] / "one")
        assert results[0]["jobs"]["pipeline"] == expected

    def test_a_checkpoint_of_ranks_continues_on_one(self, results: list[Result]) -> None:
        """Another number of ranks rounds gradients otherwise: the losses agree to what FP8 gradients differ by."""
        torch.set_num_threads(1)
        folder = results[0]["folder"] / "zero 1"
        refs = tuple(ref for ref in checkpoint.complete_in(folder / "checkpoints") if ref.step == 2)
        losses = losses_of(job(str(results[0]["corpus"]), 1), RankEnv(), folder, refs)
        assert losses == pytest.approx(results[0]["jobs"]["plain"][2:], rel=5e-3)


class TestRefusals:
    def test_tensor_ranks_in_a_job(self) -> None:
        with pytest.raises(ValueError, match="muon orthogonalizes whole ones"):
            job("/corpus", 2, parallelism={"tensor": 2})
