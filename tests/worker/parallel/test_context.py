"""Context parallelism over two real ranks (gloo): losses, gradients and norms of one process, and bytes on the wire.

`test_context_and_data.py` has all levels, data ranks, ZeRO and jobs.
"""

import pytest
import torch

from tests.ranks import free_port, run_ranks
from tests.worker.parallel.context_runs import of_documents, work_of_two
from tests.worker.parallel.tensor_runs import (
    GRADIENT_ERROR,
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    Result,
    batch_of,
    make,
    make_network,
    reference,
)
from worker.mesh import Axis
from worker.models.context import ContextPart, divide_sequences

NUM_RANKS = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("context")
    run_ranks(work_of_two, (free_port(), str(folder)), NUM_RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]


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
    model, _ = make(name, "fp32")
    loss = model.loss(of_documents() if has_documents else batch_of(0, 0, 0)).loss
    loss.backward()
    for result in results:
        assert result[name]["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
        for parameter_name, parameter in model.named_parameters():
            assert parameter.grad is not None
            error = (result[name]["gradients"][parameter_name] - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert float(error) < GRADIENT_ERROR, parameter_name


def test_ranks_train_as_one_process_does(results: list[Result]) -> None:
    losses, norms = reference("gpt", "O3", 1)
    for result in results:
        assert result["O3"]["losses"] == pytest.approx(losses, rel=LOSS_TOLERANCE["fp8"])
        assert result["O3"]["norms"] == pytest.approx(norms, rel=NORM_TOLERANCE["fp8"])


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


def test_what_cannot_be_divided_is_refused() -> None:
    axis = Axis("context", 2, 0, torch.device("cpu"))
    with pytest.raises(ValueError, match="multiples of 4"):
        ContextPart(axis).own(torch.arange(6))
    with pytest.raises(ValueError, match="allowed: gpt and llama"):
        divide_sequences(torch.nn.Linear(2, 2), axis)
