"""A rank of a divided model makes at most its share and one parameter, and gets the bits of the whole model."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks
from tests.kit.text import write_corpus
from tests.worker.parallel.init_runs import FOLDERS, HIDDEN, LARGEST, PIECE, Result, document, save_networks, work

pytestmark = pytest.mark.system
LEVELS = ("O2", "O3", "O3-split", "bf16-amp")
USUAL = [
    *(("gpt", level, 2, "zero_stage", 3) for level in ("O3", "bf16-amp")),
    ("llama", "O3-split", 2, "zero_stage", 3),
    ("llama", "O3", 2, "tensor", 2),
    ("gpt", "O3-split", 2, "pipeline", 2),
    ("folder", "O3", 2, "zero_stage", 3),
    ("folder-fp8", "O3", 2, "zero_stage", 3),
]
"""Cases of `make test`: family, level, ranks, what divides the model, and its degree or stage."""
CASES = [
    pytest.param(case, marks=() if case in USUAL else pytest.mark.matrix)
    for family in ("gpt", "llama", *FOLDERS)
    for level in LEVELS
    for case in (
        (family, level, 2, "zero_stage", 1),
        (family, level, 2, "zero_stage", 3),
        (family, level, 4, "zero_stage", 3),
        (family, level, 2, "tensor", 2),
        *([] if family in FOLDERS else [(family, level, 2, "pipeline", 2)]),
    )
]
Case = tuple[Any, ...]
TEMPORARIES = 12 * PIECE * 4
"""Bytes of slack: what is encoded piece by piece, batches of tokens, scales and norms."""
READ = 2 * 16 * HIDDEN * HIDDEN * 4 + TEMPORARIES
"""Bytes that reading a checkpoint takes: a block in fp32 at most, as it was saved and as it is held while it is loaded.

The folder's network has the largest: four products of its attention, three of its MLP that are four times as large.
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[Case], list[list[Result]]]:
    """Return what each rank found of a case, in pieces and whole. The cases of one family and level share their processes."""
    folder = tmp_path_factory.mktemp("in-pieces")
    corpus = write_corpus(folder / "corpus")
    save_networks(folder)
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module]
    cases = list(dict.fromkeys(item.callspec.params["case"] for item in tests if hasattr(item, "callspec")))
    in_every_run = cases if len(cases) <= len(USUAL) else []

    @cache
    def of_world(num_ranks: int, *kind: str) -> dict[Case, list[list[Result]]]:
        own = [case for case in cases if case[2] == num_ranks and (in_every_run or case[:2] == kind)]
        jobs = {" ".join(map(str, case)): document(corpus, *case[:3], **{case[3]: case[4]}) for case in own}
        ports = {name: (free_port(), free_port(), free_port()) for name in jobs}
        run_ranks(work, (str(folder), ports, jobs), num_ranks)
        ranks = saved_by_ranks(folder, num_ranks)
        return {case: [rank[" ".join(map(str, case))] for rank in ranks] for case in own}

    return lambda case: of_world(case[2], *(() if in_every_run else case[:2]))[case]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_makes_its_share_and_one_parameter(case: Case, results: Callable[[Case], list[list[Result]]]) -> None:
    _, _, _, kind, degree = case
    copies = 1 + 1 / degree if kind == "tensor" else 1  # a shard that is no view of the whole
    for in_pieces, whole, _ in results(case):
        limit = in_pieces["held"] + LARGEST * (4 * copies + 2) + TEMPORARIES  # with its codes, of 2 bytes at most
        assert in_pieces["peak"] <= limit, f"{in_pieces['peak']:,} of {limit:,} bytes, {in_pieces['held']:,} held"
        assert whole["peak"] > limit
        assert whole["held"] == in_pieces["held"]
    for number, (in_pieces, whole, _) in enumerate(results(case)):
        assert "model.made_whole" not in in_pieces["events"]
        assert number or "model.made_whole" in whole["events"]


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_a_model_made_whole(case: Case, results: Callable[[Case], list[list[Result]]]) -> None:
    for in_pieces, whole, _ in results(case):
        assert in_pieces["losses"] == whole["losses"]
        for moment in ("made", "trained"):
            assert in_pieces[moment].keys() == whole[moment].keys()
            assert [path for path, leaf in in_pieces[moment].items() if leaf != whole[moment][path]] == []


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_not_put_together(case: Case, results: Callable[[Case], list[list[Result]]]) -> None:
    for in_pieces, _, resumed in results(case):
        assert resumed["losses"] == in_pieces["losses"][1:]
        assert [path for path, leaf in in_pieces["trained"].items() if leaf != resumed["trained"][path]] == []
        assert resumed["peak"] <= resumed["held"] + READ, f"{resumed['peak']:,} bytes, {resumed['held']:,} held"
