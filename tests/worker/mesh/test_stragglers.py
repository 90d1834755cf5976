"""A rank that computes longer than the others is named, once, from the times that real ranks (gloo) write."""

import json
import time
from pathlib import Path
from typing import Any

import torch

from api_schemas import EventReport, JobSpec
from tests.ranks import free_port, run_ranks
from tests.worker.test_train import Recorder
from worker.config import RankEnv, resolve
from worker.mesh import Mesh, Waits
from worker.mesh.stragglers import Stragglers, find
from worker.metrics.table import Metrics
from worker.train import Trainer

SLOW_S, PERIOD_S = 0.05, 0.3


def train_with_a_slow_rank(rank: int, port: int, document: dict[str, Any], folder: str) -> None:
    """Rank 1 sleeps in each forward pass."""
    torch.set_num_threads(1)
    config, recorder, metrics = (
        resolve(JobSpec.model_validate(document), RankEnv(rank, 2, master_port=port)),
        Recorder(),
        Metrics(),
    )
    with Mesh(config.env, torch.device("cpu"), config.layout) as mesh:
        assert mesh._agreement is not None
        mesh._agreement.stragglers._period_s = PERIOD_S
        trainer = Trainer(config, mesh, recorder, Path(folder), metrics)
        trainer.model.register_forward_pre_hook(lambda *_: time.sleep(SLOW_S * rank))
        trainer.run()
    busy_s = {family.name: value for family, _, value in metrics.read()}["octet_train_busy_seconds"]
    events = [event.model_dump(mode="json") for event in recorder.of(EventReport)]
    Path(folder, f"{rank}.json").write_text(json.dumps([events, busy_s]))


def test_a_slow_rank_is_named_in_an_event_once(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    training = spec_document["training"] | {"steps": 40}
    document = spec_document | {"training": training, "resources": {"workers": 2}}
    run_ranks(train_with_a_slow_rank, (free_port(), document, str(tmp_path)), 2)
    (events, first_s), (_, second_s) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    [event] = [event for event in events if event["type"] == "rank.straggler"]
    assert event["data"]["rank"] == 1
    assert event["data"]["busy_s"] >= SLOW_S
    assert event["data"]["median_s"] < event["data"]["busy_s"]
    assert event["message"].startswith("rank 1 holds the others up: it computes 0.")
    assert second_s >= SLOW_S
    assert first_s < second_s, "the wait for the other rank is no time of its own"


def test_only_one_that_stands_out_is_a_straggler() -> None:
    found = find([1.0, 1.1, 1.6, 1.2])
    assert found is not None
    assert (found.rank, found.busy_s, found.median_s) == (2, 1.6, 1.1)
    assert find([1.0, 1.1, 1.3, 1.2]) is None
    assert find([1.0, 1.31]) is not None


def test_a_straggler_is_named_after_two_periods_and_again_when_it_returns() -> None:
    stragglers = Stragglers(None, 0, 3, Waits())
    named = []
    for slow in (2.0, 1.0, 2.0, 2.0, 2.0, 1.0, 2.0, 2.0):
        stragglers.compare([1.0, slow, 1.0])
        named.append(stragglers.take())
    assert [index for index, straggler in enumerate(named) if straggler] == [3, 7]
