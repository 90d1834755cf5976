"""N ranks that fail show one reason, and a rank that hangs is named: real ranks (gloo), and the verdict alone."""

import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from octet.api_schemas import FailureReason
from octet.worker import initialize
from octet.worker.common.config import RankEnv
from octet.worker.common.errors import Diverged, RanksFailed, message_of_rank
from octet.worker.mesh import Mesh, recorder
from octet.worker.mesh.verdict import Skip, Statement, decide, find_skip
from octet.worker.parallel import Parallel
from tests.kit.ports import free_port
from tests.kit.ranks import PRELOADED

NUM_RANKS = 4
TIMEOUT_S = 2.0
LONG_S = 60.0


def fail(rank: int, mesh: Mesh) -> None:
    mesh.world.sum(1.0)
    if rank == 2:
        raise ZeroDivisionError("the data of rank 2 is bad")
    mesh.world.sum(1.0)


def fail_alike(rank: int, mesh: Mesh) -> None:
    mesh.world.sum(1.0)
    if rank in (1, 3):
        raise Diverged("the loss is 9")
    mesh.world.sum(1.0)


def die(rank: int, mesh: Mesh) -> None:
    mesh.world.sum(1.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.world.sum(1.0)


def die_with_the_store(rank: int, mesh: Mesh) -> None:
    mesh.world.sum(1.0)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.world.sum(1.0)


def stand_still(rank: int, mesh: Mesh) -> None:
    """The parent of the ranks ends a stopped process when all others have ended."""
    mesh.world.sum(1.0)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    mesh.world.sum(1.0)


def loop_forever(rank: int, mesh: Mesh) -> None:
    mesh.world.sum(1.0)
    while rank == 1:
        time.sleep(0.001)
    mesh.stage.max_(torch.ones(1))


def loop_forever_recorded(rank: int, mesh: Mesh) -> None:
    """Run `loop_forever`. `rank_of_a_story` switches torch's flight recorder on, as it is on NCCL."""
    loop_forever(rank, mesh)


def leave_one_out(rank: int, mesh: Mesh) -> None:
    mesh.world.sum(1.0)
    if rank != 2:
        mesh.stage.max_(torch.ones(64))
    mesh.world.start_gather(torch.ones(3)).wait()


def skip_a_block(rank: int, mesh: Mesh) -> None:
    """Run four blocks at ZeRO stage 3. All ranks but rank 1 skip the middle two, forward and backward."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))
    model, optimizer = initialize(blocks, torch.optim.AdamW(blocks.parameters()), "O3", convert_heads=True)
    assert optimizer is not None
    parallel = Parallel(model, optimizer, mesh, zero_stage=3)
    x = torch.ones(4, 32)
    for index, block in enumerate(blocks):
        x = x if index in (1, 2) and rank != 1 else block(x)
    x.sum().backward()
    parallel.synchronize()


def rank_of_a_story(rank: int, story: Callable[[int, Mesh], None], port: int, folder: str) -> None:
    torch.set_num_threads(1)
    if story is loop_forever_recorded:
        recorder.switch_on()
    env = RankEnv(rank=rank, world_size=NUM_RANKS, master_port=port)
    path, began = Path(folder, f"{rank}.json"), time.monotonic()
    try:
        with Mesh(env, torch.device("cpu"), timeout_s=TIMEOUT_S) as mesh:
            story(rank, mesh)
    except Exception as error:  # noqa: BLE001  what it is, is what is tested
        reason = getattr(error, "reason", None)
        path.write_text(json.dumps([type(error).__name__, reason, str(error), time.monotonic() - began]))


def tell(story: Callable[[int, Mesh], None], folder: Path, lost: tuple[int, ...] = ()) -> tuple[str, str]:
    """Run a story; return the reason and the message that all ranks but the lost ones ended with."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    arguments = (story, free_port(), str(folder))
    processes = [context.Process(target=rank_of_a_story, args=(rank, *arguments)) for rank in range(NUM_RANKS)]
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        if rank not in lost:
            process.join(LONG_S)
    for process in processes:
        process.kill()
        process.join()
    said = {rank: json.loads(path.read_text()) for rank in range(NUM_RANKS) if (path := folder / f"{rank}.json").exists()}
    assert set(said) == set(range(NUM_RANKS)) - set(lost), said
    [(kind, reason, message)] = {tuple(ending[:3]) for ending in said.values()}
    assert kind == "RanksFailed"
    assert max(ending[3] for ending in said.values()) < LONG_S
    return reason, message


def test_the_first_error_is_shown_on_all_ranks_with_those_that_followed(tmp_path: Path) -> None:
    reason, message = tell(fail, tmp_path)
    assert reason == FailureReason.WORKER_ERROR
    assert message == "rank 2 of 4: ZeroDivisionError: the data of rank 2 is bad\n(rank 0, 1, 3 of 4 only followed)"


@pytest.mark.matrix
def test_ranks_with_the_same_error_are_listed(tmp_path: Path) -> None:
    reason, message = tell(fail_alike, tmp_path)
    assert reason == FailureReason.DIVERGED
    assert message == "rank 1, 3 of 4: the loss is 9\n(rank 0, 2 of 4 only followed)"


def test_a_killed_rank_is_named_and_not_its_peers_lost_connections(tmp_path: Path) -> None:
    reason, message = tell(die, tmp_path, lost=(1,))
    assert reason == FailureReason.WORKER_LOST
    assert message.startswith("rank 1 of 4 ended without a word. rank 0, 2, 3: in sum of 8 bytes over world (number 2 there)")
    assert "closed by peer" not in message


@pytest.mark.matrix
def test_the_rank_that_holds_the_store_is_named_when_it_is_killed(tmp_path: Path) -> None:
    reason, message = tell(die_with_the_store, tmp_path, lost=(0,))
    assert reason == FailureReason.WORKER_LOST
    assert message.startswith("rank 0 of 4 ended without a word")


@pytest.mark.system
def test_a_rank_in_an_endless_loop_is_found_by_the_timeout_with_its_stack(tmp_path: Path) -> None:
    reason, message = tell(loop_forever, tmp_path, lost=(1,))
    assert reason == FailureReason.STALLED
    assert message.startswith(
        "rank 1 of 4 takes no part, after step 0. rank 0, 2, 3: in max of 4 bytes over stage (number 1 there)"
    )
    assert re.search(r"stack of rank 1:\n.*in loop_forever\n", message, re.DOTALL)


@pytest.mark.matrix
def test_the_flight_recorder_says_which_collectives_have_not_ended(tmp_path: Path) -> None:
    reason, message = tell(loop_forever_recorded, tmp_path, lost=(1,))
    assert reason == FailureReason.STALLED
    assert message.startswith("rank 1 of 4 takes no part")
    assert "\nnot ended on rank 0, 2, 3 (torch's flight recorder): gloo:all_reduce of Float [1] in group 0 (" in message


def test_a_recorded_dump_shows_the_collectives_that_have_not_ended() -> None:
    dump = Path(__file__).with_name("flight_recorder.json").read_text()
    assert len(json.loads(dump)["entries"]) == 4
    expected = ("gloo:all_reduce of Float [4] in group 0 (default_pg), number 3, scheduled",)
    assert recorder.unended(dump) == expected
    waits = Statement(waits_for="sum", num_started={"world": 3}, unended=expected)
    message = decide({0: waits, 1: Statement(stack="  File ..."), 2: waits}, 3).message
    assert message.endswith(f"\nnot ended on rank 0, 2 (torch's flight recorder): {expected[0]}")


@pytest.mark.matrix
def test_a_stopped_rank_is_found_by_the_timeout(tmp_path: Path) -> None:
    reason, message = tell(stand_still, tmp_path, lost=(3,))
    assert reason == FailureReason.STALLED
    assert message.startswith("rank 3 of 4 does not answer: its process is stopped")
    assert "rank 0-2: in sum of 8 bytes over world (number 2 there)" in message


@pytest.mark.matrix
def test_a_rank_that_left_out_a_collective_is_named_with_its_stack(tmp_path: Path) -> None:
    reason, message = tell(leave_one_out, tmp_path)
    assert reason == FailureReason.STALLED
    assert message.startswith(
        "rank 2 of 4 is in another collective than the rest: a rank has left one out. rank 0, 1, 3: in max"
    )
    assert "rank 2: in gather of 12 bytes over world (number 2 there)" in message
    assert "rank 2 has started 2 over world; rank 0 has started 1 over stage, 1 over world." in message
    assert re.search(r"stack of rank 2:\n.*in leave_one_out\n", message, re.DOTALL)


@pytest.mark.matrix
def test_the_ranks_that_skipped_a_block_are_named_and_not_the_one_that_waits_for_them(tmp_path: Path) -> None:
    reason, message = tell(skip_a_block, tmp_path)
    assert reason == FailureReason.STALLED
    assert message.startswith("rank 0, 2, 3 of 4 has skipped block ")
    assert "which rank 1 has run; at ZeRO stage 3 all ranks run the same blocks in the same order. rank 0" in message
    assert "rank 1: in gather" in message
    assert "\nstack of rank 0:\n" in message
    assert "\nstack of rank 1:\n" not in message


def test_a_rank_that_leaves_a_block_out_is_told_from_those_that_run_it() -> None:
    whole, without_2 = (5, (0, 1, 2, 3, 4)), (4, (0, 1, 3, 4))
    assert find_skip({0: whole, 1: without_2, 2: whole}) == Skip((1,), 2, (0, 2))
    assert find_skip({0: without_2, 1: without_2, 2: whole}) == Skip((0, 1), 2, (2,))
    assert find_skip({0: (905, (1, 2, 3, 4)), 1: (904, (1, 3, 4))}) == Skip((1,), 2, (0,)), "only the newest are kept"
    forward_and_back, prefetched = (7, (0, 1, 2, 3, 3, 2, 1)), (6, (0, 1, 3, 3, 2, 0))
    assert find_skip({0: prefetched, 1: forward_and_back, 2: prefetched}) == Skip((0, 2), 2, (1,))


def test_nobody_is_named_where_blocks_run_in_two_orders_or_in_one() -> None:
    assert find_skip({0: (3, (0, 1, 2)), 1: (3, (0, 2, 1))}) is None
    assert find_skip({0: (2, (0, 1)), 1: (2, (0, 2))}) is None
    assert find_skip({0: (3, (0, 1, 2)), 1: (3, (0, 1, 2))}) is None
    assert find_skip({0: (3, (0, 1, 2)), 1: (2, (0, 1))}) is None, "the second may have left out a collective of another kind"
    assert find_skip({0: (0, ()), 1: (0, ())}) is None


def test_the_message_says_who_skipped_what_and_where_all_ranks_wait() -> None:
    gathers, exchanges = "gather over data (number 5 there)", "exchange over data (number 6 there)"
    ran = Statement(waits_for=gathers, num_started={"data": 5}, num_blocks=3, blocks=(0, 1, 2))
    skipped = Statement(waits_for=exchanges, num_started={"data": 6}, stack="  File ...", num_blocks=2, blocks=(0, 2))
    reason, message = decide({0: skipped, 1: ran, 2: skipped}, 3)
    assert reason is FailureReason.STALLED
    assert message.startswith("rank 0, 2 of 3 has skipped block 1, which rank 1 has run")
    assert f"rank 1: in {gathers}" in message
    assert f"rank 0, 2: in {exchanges}" in message
    assert Statement.from_json(ran.to_json()) == ran


def waiting(where: str, **started: int) -> Statement:
    return Statement(step=7, waits_for=where, waits_s=9.0, num_started=started, stack="  File ...")


def test_a_cause_outweighs_those_that_only_follow() -> None:
    """Whoever speaks first: a rank that lost its connection is no cause."""
    lost = Statement("worker_lost", "sum over world (number 9 there) failed: Connection closed by peer", waits_for="sum")
    cause, other = Statement("data_error", "no file", is_cause=True), Statement("diverged", "bad", is_cause=True)
    reason, message = decide({3: lost, 1: cause, 0: cause, 2: other}, 5)
    assert reason is FailureReason.DATA_ERROR
    assert message == "rank 0, 1 of 5: no file\nrank 2 of 5, later: bad\n(rank 3, 4 of 5 only followed)"
    assert decide(dict.fromkeys(range(3), cause), 3).message == "all 3 ranks: no file"


def test_a_collective_that_fails_with_all_ranks_alive_shows_its_error() -> None:
    lost = Statement(
        "worker_lost", "sum over world (number 9 there) failed: bad size", waits_for="sum", num_started={"world": 9}
    )
    reason, message = decide(dict.fromkeys(range(4), lost), 4)
    assert reason is FailureReason.WORKER_ERROR
    assert message.startswith("all 4 ranks are in one collective and none gets on. rank 0-3: in sum after step 0.")
    assert message.endswith("bad size")


def test_two_ranks_apart_are_both_shown() -> None:
    reason, message = decide({0: waiting("sum", world=2), 1: waiting("max", world=1)}, 2)
    assert reason is FailureReason.STALLED
    assert message.startswith("the ranks are in different collectives: a rank has left one out. rank 0: in sum")
    assert "rank 0 has started 2 over world; rank 1 has started 1 over world." in message


def test_an_error_that_is_not_agreed_on_names_its_rank() -> None:
    assert message_of_rank(ValueError("no"), 1, 4) == "rank 1 of 4: ValueError: no"
    assert message_of_rank(ValueError("no"), 0, 1) == "ValueError: no"
    assert message_of_rank(RanksFailed(FailureReason.DIVERGED, "rank 2 of 4: bad"), 1, 4) == "rank 2 of 4: bad"
