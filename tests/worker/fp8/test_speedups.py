"""Which shapes gain in FP8: the table, what is between its sizes, and the decision that is made by it."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.gpu.roofline import ASSUMPTIONS, PLAIN_BF16, as_text, computed_table, fp8_work, rates_of
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.recipe import RecipeSpec
from octet.worker.fp8.speedups import (
    DEFAULT_TOKENS,
    KINDS,
    TABLES,
    WEIGHTS,
    Chip,
    SpeedupTable,
    kind_of,
    load_tables,
    table_for,
    why_bf16,
)

HOPPER = (9, 0)
H200 = Chip("NVIDIA H200", HOPPER)
POWERS = {weights: {kind: [[[0.5, 1.0], [1.0, 2.0]], [[1.0, 2.0], [2.0, 4.0]]] for kind in KINDS} for weights in WEIGHTS}
TABLE = SpeedupTable(HOPPER, "measured", "A card", "torch 0", "2026-01-01", (1024, 4096), (512, 2048), POWERS)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_table_is_whole_and_if_computed_what_the_generator_writes(weights: str, kind: str) -> None:
    table = table_for(H200, load_tables())
    speedups = table.speedups[weights][kind]
    assert [len(by_in) for by_in in speedups] == [len(table.features)] * len(table.tokens)
    assert all(0.1 < value < 3 for by_in in speedups for by_out in by_in for value in by_out)
    assert list(table.tokens) == sorted(set(table.tokens))
    assert list(table.features) == sorted(set(table.features))
    if table.source == "computed":
        assert TABLES.read_text() == as_text([computed_table()])
    else:
        assert re.fullmatch(r"2\d{3}-\d\d-\d\d", table.date)
        assert table.device
        assert "torch" in table.versions


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_by_computation_a_wider_layer_gains_no_less(weights: str, kind: str) -> None:
    """More tokens may gain less: the fewer there are, the more it matters that FP8 weights are fewer bytes."""
    for by_in in computed_table().speedups[weights][kind]:
        for row in [*by_in, *zip(*by_in, strict=True)]:
            assert all(narrow <= wide for narrow, wide in pairwise(row))
    if (kind, weights) == ("tensor", "fp32"):
        for shapes in zip(*all_shapes(computed_table(), weights, kind), strict=True):
            assert all(few <= many for few, many in pairwise(shapes))


def all_shapes(table: SpeedupTable, weights: str, kind: str) -> Iterator[list[float]]:
    for by_in in table.speedups[weights][kind]:
        yield [value for by_out in by_in for value in by_out]


def test_the_computation_agrees_with_what_is_published_of_large_layers() -> None:
    """torchao on an H100: 1.39 with tensor scales at 4096×8192×16384. A small layer loses more than torchao's fused 0.80."""
    bf16_weight = replace(fp8_work("scaled", "tensor"), weight_bytes=2 * (2 + 2 + 1), num_launches=3 + 1 + 3 + 3 + 3)
    fast = rates_of("fast")
    ratios = [PLAIN_BF16.seconds(*shape, fast) / bf16_weight.seconds(*shape, fast) for shape in (
        (4096, 8192, 16384), (1024, 2048, 1024),
    )]  # fmt: skip
    assert ratios[0] == pytest.approx(1.39, abs=0.05)
    assert ratios[1] < 0.8


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_computed_table_has_both_ends_and_its_assumptions(weights: str) -> None:
    """Backward products by tensor scales run without fast accumulation, which the fast end assumes."""
    table = computed_table()
    assert dict(table.assumptions) == ASSUMPTIONS
    shape = (8192, 4096, 4096, weights)
    slowest, fastest = table.ends(*shape, "tensor")
    assert slowest < table.speedup(*shape, "tensor") < fastest
    assert fastest > 1.05 * table.speedup(*shape, "tensor")
    assert table.ends(*shape, "row") == []
    assert TABLE.ends(2048, 1024, 1024, weights, "tensor") == []


@pytest.mark.parametrize(("shape", "speedup"), [
    ((1024, 512, 512), 0.5), ((4096, 2048, 2048), 4.0), ((1024, 2048, 512), 1.0),  # on the grid
    ((2048, 512, 512), 0.75), ((1024, 1024, 1024), 0.5 + 0.25 + 0.25 + 0.125),  # halfway by powers of two
    ((1, 1, 1), 0.5), ((10**6, 10**5, 10**5), 4.0), ((10**6, 16, 16), 1.0),  # beyond the edges
])  # fmt: skip
def test_between_sizes_and_beyond_them(shape: tuple[int, int, int], speedup: float) -> None:
    assert TABLE.speedup(*shape, "fp32", "row") == pytest.approx(speedup)


@pytest.mark.parametrize(("recipe", "kind"), [
    (RecipeSpec(scaling="delayed"), "tensor"), (RecipeSpec(granularity="row", format="E4M3"), "row"),
    (RecipeSpec(granularity="block"), "block"), (RecipeSpec(granularity="block", format="HYBRID"), "block, hybrid"),
])  # fmt: skip
def test_every_recipe_is_of_a_kind(recipe: RecipeSpec, kind: str) -> None:
    assert kind_of(recipe) == kind
    assert all(kind_of(known) == name for name, known in KINDS.items())


def test_nothing_is_filtered_where_fp8_is_not_for_speed_or_nothing_is_known_of_the_recipe() -> None:
    assert why_bf16(16, 16, 1, LEVELS["O2"], RecipeSpec(), None) is None
    assert why_bf16(16, 16, 1, LEVELS["O2"], RecipeSpec(granularity="mx"), Chip("NVIDIA B200", (10, 0))) is None


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_a_device_without_a_table_takes_the_nearest_and_says_so(capability: tuple[int, int]) -> None:
    reason = why_bf16(16, 16, 1, LEVELS["O2"], RecipeSpec(), Chip("Another card", capability))
    assert reason is not None
    major, minor = capability
    origin = table_for(H200, load_tables()).origin
    assert reason.endswith(f" by other assumptions ({origin}; Another card ({major}.{minor}) has no table)")


def test_a_device_takes_its_own_table_before_one_of_its_capability() -> None:
    named = replace(TABLE, device="Another card", capability=(12, 0))
    computed = replace(TABLE, source="computed", device="", capability=(10, 0))
    tables = [TABLE, named, computed]
    assert table_for(Chip("Another card", HOPPER), tables) is named
    assert table_for(Chip("A third", (10, 3)), tables) is computed
    assert table_for(Chip("A third", (12, 0)), tables) is named
    assert table_for(Chip("A third", (8, 9)), tables) is TABLE
    assert TABLE.origin_for(Chip("A card", HOPPER)) == TABLE.origin
    assert TABLE.origin_for(Chip("A third", HOPPER)) == f"{TABLE.origin}; A third (9.0) has no table"


@pytest.mark.parametrize("level", ["te", "O2"])
def test_a_small_layer_stays_in_bf16_and_a_large_one_does_not(level: str) -> None:
    assert why_bf16(8192, 8192, DEFAULT_TOKENS, LEVELS[level], RecipeSpec(), H200) is None
    reason = why_bf16(512, 1536, DEFAULT_TOKENS, LEVELS[level], RecipeSpec(), H200)
    assert reason is not None
    origin = re.escape(table_for(H200, load_tables()).origin_for(H200))
    ends = r"0\.\d\d to 0\.\d\d by other assumptions"
    assert re.fullmatch(rf"512 -> 1536 features at 8,192 tokens: 0\.\d\d of bf16's speed in FP8, {ends} \({origin}\)", reason)


def test_the_reason_says_whether_a_table_is_measured() -> None:
    assert TABLE.origin == "measured on A card, 2026-01-01"
    assert computed_table().origin == "computed for compute capability 9.0, not measured"
