"""Context parallelism over two real ranks (gloo): losses, gradients and norms of one process, and bytes on the wire.

`test_context_and_data.py` has all levels, data ranks, ZeRO and jobs.
"""

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from octet.worker import parallelize
from octet.worker.mesh import Axis
from octet.worker.models import context
from octet.worker.models.context import ContextPart
from octet.worker.parallel.strategies import divide_sequences
from octet.worker.parallel.strategy import check_loss_scaling
from tests.worker.parallel.compare import check_gradients, check_training, found_by_ranks
from tests.worker.parallel.context_runs import GROUPED, check_own_loop, of_documents, work_of_two
from tests.worker.parallel.tensor_runs import Result, batch_of, make, make_network

NUM_RANKS = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Return each rank's results."""
    return found_by_ranks(work_of_two, NUM_RANKS, tmp_path_factory.mktemp("context"), num_worlds=2)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_token_is_on_one_rank_and_the_work_is_balanced(num_ranks: int) -> None:
    """Work: the keys that a rank's queries attend to."""
    whole = torch.arange(32).expand(3, 32)
    parts = [ContextPart(Axis("context", num_ranks, rank, whole.device)).own(whole) for rank in range(num_ranks)]
    assert sorted(torch.cat(parts, 1)[0].tolist()) == list(range(32))
    assert {int((part[0] + 1).sum()) for part in parts} == {33 * 32 // 2 // num_ranks}
    assert parts[0][0, 0] == 0
    assert parts[0][0, -1] == 31


@pytest.mark.parametrize(("name", "has_documents"), [("gpt", False), ("llama", True)])
def test_gradients_are_those_of_one_process(results: list[Result], name: str, has_documents: bool) -> None:
    """With documents, each row has several, and the ranks have different numbers of targets."""
    for result in results:
        check_gradients(result[name], name, [of_documents() if has_documents else batch_of(0, 0, 0)])


def test_ranks_train_as_one_process_does(results: list[Result]) -> None:
    check_training([result["O3"] for result in results], "gpt", "O3", 1)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_somebodys_own_loop_divides_sequences(results: list[Result], zero_stage: int) -> None:
    """Its ranks read the same samples, and the mean of their losses is that of one process."""
    ranks = [result["own"][zero_stage] for result in results]
    check_own_loop(ranks)
    assert ranks[0]["losses"] != ranks[1]["losses"]


def test_an_evaluation_counts_all_targets(results: list[Result]) -> None:
    model = make_network("llama").eval()
    with torch.no_grad():
        losses = model.loss(of_documents())
    expected = (float(losses.loss), float(losses.metrics["token_accuracy"]), losses.num_targets)
    for result in results:
        assert result["evaluated"] == pytest.approx(expected, rel=1e-6)


def test_bytes_on_the_context_axis_are_those_of_the_formula(results: list[Result]) -> None:
    """Keys and values of a rank's tokens, two heads of 16, to each other rank; the gradients of the others' back."""
    own = 2 * (2 * 16 // NUM_RANKS) * (2 * 16) * 4
    for result in results:
        assert result["sent"] == {("gather", "float32"): own, ("exchange", "float32"): own}


@pytest.mark.parametrize("has_documents", [False, True])
def test_groups_of_query_heads_share_the_gathered_keys(results: list[Result], has_documents: bool) -> None:
    """Kept are keys and values of all tokens, once for each head of keys, and the outputs; no copies for queries."""
    num_tokens, size = GROUPED["tokens"], GROUPED["head size"]
    gathered = 2 * GROUPED["key heads"] * num_tokens * size * 4
    outputs = GROUPED["query heads"] * (num_tokens // NUM_RANKS) * size * 4
    copies = gathered * GROUPED["query heads"] // GROUPED["key heads"]
    statistics = outputs // size  # the logarithm of a sum for each query
    # Of the queries and the keys of both chunks; or, at most, a CPU kernel's causal masks of both.
    starts = 2 * 2 * 3 * 4 if has_documents else 2 * num_tokens * (num_tokens // NUM_RANKS) * 4
    for result in results:
        found = result["kept"][has_documents]
        assert gathered + outputs <= found["kept"] <= gathered + outputs + statistics + starts
        assert found["kept"] < copies
        assert found["sent"] == 2 * gathered // NUM_RANKS


def test_one_query_head_at_a_time_attends_as_all_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some devices have no kernels that take groups."""
    numbers = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, tokens, 16, generator=numbers) for heads, tokens in ((6, 8), (2, 24), (2, 24)))
    parts = [part.requires_grad_() for part in (query, key, value)]
    found = []
    for takes_groups in (True, False):
        monkeypatch.setattr(context, "_takes_groups", lambda *_, takes=takes_groups, **__: takes)
        mixed = context.attend_in_groups(*parts, attn_mask=causal_lower_right(8, 24))
        found.append([mixed, *torch.autograd.grad(mixed.square().sum(), parts)])
    for grouped, one_by_one in zip(*found, strict=True):
        torch.testing.assert_close(grouped, one_by_one)
    copied = [part.repeat_interleave(3, dim=1) for part in parts[1:]]
    expected = scaled_dot_product_attention(query, *copied, attn_mask=causal_lower_right(8, 24))
    torch.testing.assert_close(found[0][0], expected)


def test_what_cannot_be_divided_is_refused() -> None:
    axis = Axis("context", 2, 0, torch.device("cpu"))
    with pytest.raises(ValueError, match="multiples of 4"):
        ContextPart(axis).own(torch.arange(6))
    with pytest.raises(ValueError, match="allowed: gpt and llama"):
        divide_sequences(torch.nn.Linear(2, 2), axis)
    with pytest.raises(ValueError, match="got context 2 with 1 ranks; allowed: 1, or a divisor"):
        parallelize(*make("gpt", "O2"), context=2)
    with pytest.raises(ValueError, match="allowed with a context degree: levels without loss scaling"):
        check_loss_scaling(make("gpt", "fp16-amp")[0], "a context degree")
