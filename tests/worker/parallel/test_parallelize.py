"""`parallelize` in a loop of one's own: ranks become one, hooks do the rest, and what cannot work is refused."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from octet.api_schemas import PrecisionSpec
from octet.api_schemas.levels import LEVELS
from octet.worker import initialize, parallelize
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.mesh import Axis
from octet.worker.parallel import GradientBuckets
from octet.worker.parallel.buckets import CodesBucket, WideBucket
from tests.golden.record import digest
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks
from tests.kit.small_model import FP8_LEVELS, Small, make

NUM_RANKS = 2
ALONE = Axis("data", 1, 0, torch.device("cpu"))
DROPPED = [(0, "to none"), (1, "to none"), (0, "to zero")]
Result = dict[str, Any]


def train(rank: int, level: str, zero_stage: int, max_norm: float | None) -> Result:
    """Three steps of two micro-batches from a model that each rank has drawn for itself."""
    model, optimizer = make(level, seed=rank)
    parallel = parallelize(model, optimizer, zero_stage=zero_stage)
    numbers = torch.Generator().manual_seed(rank)
    losses, norms = [], []
    for _ in range(3):
        with parallel.no_sync():
            model(torch.randn(8, 32, generator=numbers)).square().mean().backward()
        loss = model(torch.randn(8, 32, generator=numbers)).square().mean()
        loss.backward()
        if max_norm is not None:
            norms.append(float(parallel.clip_grad_norm_(max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    states = {"model": exact_state_dict(model), "optimizer": optimizer.state_dict()}
    sent = {dtype for collective, dtype in parallel.data.sent_bytes if collective == "exchange"}
    return {"state": digest(states), "losses": losses, "norms": norms, "sent": sent}


def one_rank_has_no_gradient(rank: int, zero_stage: int) -> list[bool]:
    """Run a step in which only rank 0 has backward passes. Return for each layer if its weight has changed."""
    model, optimizer = make("O2")
    parallel = parallelize(model, optimizer, zero_stage=zero_stage)
    before = [layer.weight.detach().clone() for layer in (model.first, model.last)]
    with parallel.no_sync():
        if rank == 0:
            model(torch.ones(4, 32)).sum().backward()
    if rank == 0:
        model(torch.ones(4, 32)).sum().backward()
    optimizer.step()
    return [not torch.equal(old, layer.weight) for old, layer in zip(before, (model.first, model.last), strict=True)]


def after_dropped_gradients(rank: int, zero_stage: int, drop: str) -> bool:
    """Drop means without a step, then step with a gradient on rank 0 alone. Return True if the weight changes."""
    model, optimizer = make("O2")
    parallelize(model, optimizer, zero_stage=zero_stage)
    model(torch.ones(4, 32)).sum().backward()
    optimizer.zero_grad(set_to_none=drop == "to none")
    before = model.last.weight.detach().clone()
    if rank == 0:
        model(torch.ones(4, 32)).sum().backward()
    optimizer.step()
    return not torch.equal(before, model.last.weight)


def draws(rank: int) -> Result:
    """Seed all ranks alike. Return the elements that dropout keeps in two passes, and the script's draw after each.

    following, resumed: the elements kept in the next pass, and again after the random state is restored and an evaluation.
    """
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters())
    parallelize(model, optimizer)
    torch.manual_seed(7)
    kept, scripts = [], []
    for _ in range(2):
        kept.append((model(torch.ones(1, 1)) != 0).tolist())
        scripts.append(float(torch.rand(())))
    state = torch.get_rng_state()
    following = (model(torch.ones(1, 1)) != 0).tolist()
    torch.set_rng_state(state)
    model.eval()(torch.ones(1, 1))
    resumed = (model.train()(torch.ones(1, 1)) != 0).tolist()
    return {"kept": kept, "scripts": scripts, "following": following, "resumed": resumed}


def message(call: Any) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing was refused"


def refusals() -> dict[str, str]:
    codes, values = make("O2")[0], make("te")[0]
    sgd = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    sharded, optimizer = make("O3-split")
    parallelize(sharded, optimizer, zero_stage=1)
    sharded(torch.ones(4, 32)).sum().backward()
    clip = nn.utils.clip_grad_norm_
    return {
        "clip": message(lambda: clip(sharded.parameters(), 1.0)),
        "second backward": message(lambda: sharded(torch.ones(4, 32)).sum().backward()),
        "copy": message(lambda: copy.deepcopy(sharded)),
        "ddp": message(lambda: DistributedDataParallel(codes)),
        "ddp of values": message(lambda: DistributedDataParallel(values)),
        "dtype": message(lambda: parallelize(*make("O2"), wide_communication="fp16")),
        "stage": message(lambda: parallelize(*make("O2"), zero_stage=4)),
        "no blocks": message(lambda: parallelize(*make("O2"), zero_stage=3)),
        "optimizer": message(lambda: parallelize(nn.Linear(2, 2), sgd, zero_stage=1)),
    }


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS)
    cases = [("O2", 0, None), ("O3", 0, None), ("O3", 1, None), ("O3", 0, 0.1), ("O3", 1, 0.1), ("te", 1, None)]
    found: Result = {"trained": {case: train(rank, *case) for case in cases}}
    found["changed"] = [one_rank_has_no_gradient(rank, zero_stage) for zero_stage in (1, 2)]
    found["dropped"] = [after_dropped_gradients(rank, *case) for case in DROPPED]
    found["refusals"] = refusals()
    found["draws"] = draws(rank)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(work, (free_port(), str(folder)), NUM_RANKS)
    return saved_by_ranks(folder, NUM_RANKS)


def test_ranks_that_start_apart_train_one_model(results: list[Result]) -> None:
    for case, trained in results[0]["trained"].items():
        other = results[1]["trained"][case]
        assert trained["state"] == other["state"], case
        assert trained["norms"] == other["norms"], case
        assert trained["losses"] != other["losses"]  # each rank reads its own part of the batch


def test_each_rank_has_its_own_dropout_and_all_the_numbers_of_the_script(results: list[Result]) -> None:
    first, second = (result["draws"] for result in results)
    assert first["scripts"] == second["scripts"]
    assert first["scripts"][0] != first["scripts"][1]
    masks = [tuple(mask[0]) for found in (first, second) for mask in found["kept"]]
    assert len(set(masks)) == 4
    assert first["resumed"] == first["following"]


def test_sharding_changes_no_bit_of_a_step_that_does_not_clip(results: list[Result]) -> None:
    trained = results[0]["trained"]
    assert trained["O3", 1, None] == trained["O3", 0, None]
    assert trained["O3", 1, None]["state"] != trained["O3", 1, 0.1]["state"]
    assert trained["O3", 1, 0.1]["norms"] == pytest.approx(trained["O3", 0, 0.1]["norms"], rel=1e-2)


def test_gradients_travel_as_the_table_of_levels_says(results: list[Result]) -> None:
    """The other parameters' gradients travel in fp32."""
    for (level, *_), trained in results[0]["trained"].items():
        in_codes = {"float8_e4m3fn"} if LEVELS[level].gradient_communication == "fp8" else set()
        assert trained["sent"] == {"float32"} | in_codes


@pytest.mark.parametrize("accumulation", ["fp8", "fp32"])
@pytest.mark.parametrize("level", FP8_LEVELS)
def test_the_table_holds_at_every_level(level: str, accumulation: str) -> None:
    precision = PrecisionSpec.model_validate({"level": level, "gradient_accumulation": accumulation})
    options: dict[str, Any] = {"gradient_accumulation": accumulation}
    model, _ = initialize(Small(), None, level, optimizer_name="adamw", convert_heads=True, **options)
    home = {parameter: bucket for bucket in GradientBuckets(model, ALONE).buckets for parameter in bucket.parameters}
    kinds = {type(home[layer.weight]) for layer in (model.first, model.last)}
    assert kinds == {CodesBucket if precision.gradient_communication == "fp8" else WideBucket}


def test_a_rank_without_any_gradient_takes_part(results: list[Result]) -> None:
    assert [result["changed"] for result in results] == [[[True, True]] * 2] * NUM_RANKS


def test_a_rank_without_any_gradient_takes_part_after_gradients_were_dropped(results: list[Result]) -> None:
    """The drop leaves nothing that this rank could take for the means of the next step."""
    assert [result["dropped"] for result in results] == [[True] * len(DROPPED)] * NUM_RANKS


def test_torchs_data_parallel_takes_weights_for_the_values_that_they_are(results: list[Result]) -> None:
    said = results[0]["refusals"]
    assert said["ddp"] == said["ddp of values"] == "nothing was refused"


def test_a_divided_residual_is_not_copied(results: list[Result]) -> None:
    said = results[0]["refusals"]
    assert "residuals of this model's weights are divided over the ranks" in said["copy"]


def test_a_second_exchange_before_the_step_is_refused(results: list[Result]) -> None:
    assert "Use no_sync for all micro-batches but the last" in results[0]["refusals"]["second backward"]


def test_torchs_clipping_is_refused_where_it_would_clip_nothing(results: list[Result]) -> None:
    assert "Allowed: Parallel.clip_grad_norm_" in results[0]["refusals"]["clip"]


def test_what_is_not_built_is_refused(results: list[Result]) -> None:
    said = results[0]["refusals"]
    assert "zero_stage is 4; allowed: 0, 1, 2, 3" in said["stage"]
    assert "repeats no blocks; allowed: models with" in said["no blocks"]
    assert "the optimizer a SGD" in said["optimizer"]
    assert "wide_communication is 'fp16'; allowed: fp32, bf16" in said["dtype"]


def test_a_single_process_needs_no_group() -> None:
    torch.manual_seed(0)
    model, optimizer = initialize(Small(), opt_level="O2", optimizer_name="adamw")
    assert optimizer is not None
    parallel = parallelize(model, optimizer, zero_stage=1)
    model(torch.ones(4, 32)).sum().backward()
    assert float(parallel.clip_grad_norm_(1.0)) > 1
    optimizer.step()


def test_torchrun_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="init_process_group"):
        parallelize(*make("O2"))
