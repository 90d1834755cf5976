"""Why N ranks failed, in one sentence: decided from what each of them says of itself. Pure functions, no torch.

A rank's error is a cause, or it only follows: its collective failed because another rank is gone. A rank that has no error
says where it is. A rank that says nothing is gone, stopped or stuck.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Self

from octet.api_schemas import FailureReason

_MAX_STACKS = 2
_MAX_CAUSES = 8


@dataclass(frozen=True)
class Statement:
    """The state that one rank reports. `reason` and `message` are empty without an error.

    waits_for: the collective that the rank is in. step: optimizer steps that it has taken.
    num_started: collectives that it has started, by axis. stack: that of its Python code.
    num_blocks: blocks that it has gathered (ZeRO stage 3). blocks: the newest of them, in order, by
    index in the model. unended: collectives that torch's flight recorder shows as not ended, oldest
    first.
    """

    reason: str = ""
    message: str = ""
    is_cause: bool = False
    step: int = 0
    waits_for: str = ""
    waits_s: float = 0.0
    num_started: dict[str, int] = field(default_factory=dict)
    stack: str = ""
    num_blocks: int = 0
    blocks: tuple[int, ...] = ()
    unended: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        found = json.loads(text)
        return cls(**found | {name: tuple(found[name]) for name in ("blocks", "unended")})


class Verdict(NamedTuple):
    """Why the ranks failed: the same on all of them."""

    reason: FailureReason
    message: str


def decide(said: Mapping[int, Statement], num_ranks: int) -> Verdict:
    """Return the cause that the ranks' statements show, with the ranks that said the same and those that followed.

    said: by rank; ranks that said nothing are missing.
    """
    if any(statement.is_cause for statement in said.values()):
        return _first_cause(said, num_ranks)
    silent = [rank for rank in range(num_ranks) if rank not in said]
    if silent:
        return _silent(said, silent, num_ranks)
    absent = [rank for rank, statement in said.items() if not statement.waits_for and not statement.message]
    if absent and len(absent) < num_ranks:
        return _absent(said, absent, num_ranks)
    return _apart(said, num_ranks)


def _first_cause(said: Mapping[int, Statement], num_ranks: int) -> Verdict:
    """Show the first cause. The mapping has the order in which the ranks spoke."""
    by_cause: dict[tuple[str, str], list[int]] = {}
    for rank, statement in said.items():
        if statement.is_cause:
            by_cause.setdefault((statement.reason, statement.message), []).append(rank)
    (reason, message), ranks = next(iter(by_cause.items()))
    lines = [f"{_ranks(ranks, num_ranks)}: {message}"]
    for (_, other), others in list(by_cause.items())[1:_MAX_CAUSES]:
        lines.append(f"{_ranks(others, num_ranks)}, later: {other}")
    named = {rank for ranks in by_cause.values() for rank in ranks}
    if followed := [rank for rank in range(num_ranks) if rank not in named]:
        lines.append(f"({_ranks(followed, num_ranks)} only followed)")
    return Verdict(FailureReason(reason), "\n".join(lines))


def _silent(said: Mapping[int, Statement], silent: list[int], num_ranks: int) -> Verdict:
    """Name ranks that say nothing. Ranks that lost a connection to them show that they are gone, others that they hang."""
    who, others = _ranks(silent, num_ranks), _positions(said)
    if len({statement.waits_for for statement in said.values()}) > 1:
        others += " These ranks are not in one collective: one may have left one out."
    if any(statement.message for statement in said.values()):
        return Verdict(FailureReason.WORKER_LOST, f"{who} ended without a word. {others}")
    message = f"{who} does not answer: its process is stopped, stuck outside Python, or its node is gone. {others}"
    return Verdict(FailureReason.STALLED, message + _unended(said))


def _absent(said: Mapping[int, Statement], absent: list[int], num_ranks: int) -> Verdict:
    """Name ranks that take no part in the collective in which the others wait."""
    others = _positions({rank: statement for rank, statement in said.items() if rank not in absent})
    steps = ", ".join(map(str, sorted({said[rank].step for rank in absent})))
    message = f"{_ranks(absent, num_ranks)} takes no part, after step {steps}. {others}"
    return Verdict(FailureReason.STALLED, message + _stacks(said, absent))


def _apart(said: Mapping[int, Statement], num_ranks: int) -> Verdict:
    """Name the ranks that wait in another collective than most, or that have started another number of them."""
    places = {rank: (said[rank].waits_for, *sorted(said[rank].num_started.items())) for rank in sorted(said)}
    [(usual, count), *_] = Counter(places.values()).most_common(1)
    odd = [rank for rank, place in places.items() if place != usual] if count > num_ranks / 2 else list(places)
    failed = sorted({statement.message for statement in said.values() if statement.message})
    reason = FailureReason.WORKER_ERROR if failed else FailureReason.STALLED
    if not odd:
        where = _positions(said)
        stuck = f"all {num_ranks} ranks are in one collective and none gets on. {where}"
        return Verdict(reason, "\n".join([stuck, *failed]) + _unended(said))
    counts = "; ".join(
        f"rank {rank} has started {', '.join(f'{n} over {axis}' for axis, n in sorted(said[rank].num_started.items()))}"
        for rank in _sample(odd, places, usual)
    )
    apart = "the ranks are in different collectives"
    who = apart if len(odd) == num_ranks else f"{_ranks(odd, num_ranks)} is in another collective than the rest"
    message = f"{who}: a rank has left one out."
    if skip := find_skip({rank: (statement.num_blocks, statement.blocks) for rank, statement in said.items()}):
        odd = list(skip.ranks)
        message = (
            f"{_ranks(odd, num_ranks)} has skipped block {skip.block}, which rank {_numbers(skip.others)} has run; at ZeRO "
            "stage 3 all ranks run the same blocks in the same order."
        )
    message = f"{message} {_positions(said)} {counts}."
    return Verdict(reason, "\n".join([message, *failed]) + _stacks(said, odd))


def _sample(odd: list[int], places: Mapping[int, object], usual: object) -> list[int]:
    """The odd ranks, and one of the others to compare them with."""
    return [*odd, *[rank for rank, place in places.items() if place == usual and rank not in odd][:1]][:_MAX_CAUSES]


def _positions(said: Mapping[int, Statement]) -> str:
    """Say where ranks are, those at one place together."""
    by_place: dict[str, list[int]] = {}
    for rank, statement in sorted(said.items()):
        where = f"in {statement.waits_for}" if statement.waits_for else "outside any collective"
        by_place.setdefault(f"{where} after step {statement.step}", []).append(rank)
    parts = []
    for place, ranks in by_place.items():
        longest_s = max(said[rank].waits_s for rank in ranks)
        waited = f", waiting for {longest_s:.1f} s" if longest_s >= 0.05 else ""
        parts.append(f"rank {_numbers(ranks)}: {place}{waited}")
    return "; ".join(parts) + "." if parts else ""


def _stacks(said: Mapping[int, Statement], ranks: Iterable[int]) -> str:
    shown = [rank for rank in ranks if said[rank].stack][:_MAX_STACKS]
    stacks = "".join(f"\nstack of rank {rank}:\n{said[rank].stack.rstrip()}" for rank in shown)
    return stacks + _unended(said)


def _unended(said: Mapping[int, Statement]) -> str:
    """Say which collectives torch's flight recorder shows as not ended, for ranks that have the same ones together."""
    by_collectives: dict[tuple[str, ...], list[int]] = {}
    for rank, statement in sorted(said.items()):
        if statement.unended:
            by_collectives.setdefault(statement.unended, []).append(rank)
    return "".join(
        f"\nnot ended on rank {_numbers(ranks)} (torch's flight recorder): {'; '.join(collectives)}"
        for collectives, ranks in list(by_collectives.items())[:_MAX_CAUSES]
    )


def _ranks(ranks: list[int], num_ranks: int) -> str:
    return f"all {num_ranks} ranks" if len(ranks) == num_ranks else f"rank {_numbers(ranks)} of {num_ranks}"


def _numbers(ranks: Iterable[int]) -> str:
    """Write ranks in order, runs of three or more as first-last."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [
        str(first) if first == last else f"{first}-{last}" if last > first + 1 else f"{first}, {last}" for first, last in runs
    ]
    return ", ".join(parts)


class Skip(NamedTuple):
    """Ranks that have skipped a block, by its index in the model, and the others that have run it."""

    ranks: tuple[int, ...]
    block: int
    others: tuple[int, ...]


def find_skip(gathered: Mapping[int, tuple[int, tuple[int, ...]]]) -> Skip | None:
    """Return the first block that some ranks have gathered and others left out; None if it cannot be determined.

    gathered: for each rank the number of blocks that it has gathered so far, and the newest of them
    in order. Where the orders of two ranks part, one rank has skipped the other's block if it
    continues as the other does some blocks later. If both continue like this, or neither does, they
    run blocks in different orders, and no rank is named.
    """
    first = max((count - len(blocks) for count, blocks in gathered.values()), default=0)
    orders = {rank: blocks[first - (count - len(blocks)) :] for rank, (count, blocks) in gathered.items()}
    for number in range(min(map(len, orders.values()), default=0)):  # a rank that has fewer may only be behind
        rests = {rank: order[number:] for rank, order in orders.items()}
        here = {rest[0] for rest in rests.values()}
        if len(here) > 1:
            skips = [skip for block in sorted(here) if (skip := _skip_of(block, rests))]
            return skips[0] if len(skips) == 1 else None
    return None


def _skip_of(block: int, rests: Mapping[int, tuple[int, ...]]) -> Skip | None:
    """The skip of a block with which the rests of some ranks begin."""
    others = tuple(sorted(rank for rank, rest in rests.items() if rest[:1] == (block,)))
    whole = rests[others[0]]
    ranks = tuple(
        sorted(
            rank
            for rank, rest in rests.items()
            if rank not in others and _num_alike_later(whole, rest) > _num_alike_later(rest, whole)
        )
    )
    return Skip(ranks, block, others) if ranks else None


def _num_alike_later(whole: tuple[int, ...], part: tuple[int, ...]) -> int:
    """Return how many of the first blocks of `part` follow each other in `whole`, anywhere but at its start."""
    return max((_num_alike(whole[start:], part) for start in range(1, len(whole))), default=0)


def _num_alike(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """The length of the common beginning."""
    return next(
        (index for index, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), min(len(left), len(right))
    )
