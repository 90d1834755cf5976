"""Tensor parallelism over two real ranks (gloo): losses, gradients and norms of one process, and each pitfall of its own.

`test_pairs.py` has all levels, with data ranks and ZeRO.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

from octet.worker import parallelize
from octet.worker.mesh import Axis, AxisInBlocks, Cut
from octet.worker.mesh.axes import Axes
from octet.worker.parallel.tensor import cut_model
from octet.worker.parallel.tensor_layers import SharedInput
from octet.worker.parallel.tensor_plan import plan_of
from tests.worker.parallel.compare import check_gradients, check_resumed, check_training, found_by_ranks
from tests.worker.parallel.tensor_runs import Result, batch_of, make, make_network, partly_ignored, work_of_two

NUM_RANKS = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Return each rank's results."""
    return found_by_ranks(work_of_two, NUM_RANKS, tmp_path_factory.mktemp("two"))


def test_ranks_train_as_one_process_does(results: list[Result]) -> None:
    """Scales of weights, and replicated parameters, stay alike."""
    ranks = [result["gpt", "O3", 0] for result in results]
    check_training(ranks, "gpt", "O3", 1)
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert ranks[0]["scales"]


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_gradients_are_those_of_one_process(results: list[Result], name: str) -> None:
    check_gradients(results[0]["gradients"][name], name, [batch_of(0, 0, 0)])


def test_shards_put_together_are_the_converted_model(results: list[Result]) -> None:
    for result in results:
        assert all(result["converted"]["O3-split"].values())
        assert len(result["converted"]["O3-split"]) == 3 * 4


def test_a_nan_in_one_shard_makes_all_ranks_skip(results: list[Result]) -> None:
    assert [result["poisoned"] for result in results] == [[{"skipped": 1, "kept": True}]] * NUM_RANKS


def test_a_checkpoint_of_shards_resumes_to_the_bit(results: list[Result]) -> None:
    for result in results:
        check_resumed(result["resumed"]["O3-split", 0])


def test_no_two_shards_draw_the_same_numbers(results: list[Result]) -> None:
    first, second = (result["draws"]["shard"] for result in results[:2])
    assert first.stop == second.start
    assert {result["draws"]["whole"] for result in results} == {0}
    assert [result["draws"]["gradient"] for result in results] == [(rank, NUM_RANKS) for rank in range(NUM_RANKS)]


def test_bytes_on_the_tensor_axis_are_those_of_the_formula(results: list[Result]) -> None:
    """Sums of activations: two in each block and the embedding's forward, two in each block and the head's backward. Of the
    logits each rank tells two numbers for each token."""
    num_tokens, hidden_size, num_layers = 2 * 16, 64, 1
    for result in results:
        assert result["sent"] == {
            ("sum", "float32"): (4 * num_layers + 2) * num_tokens * hidden_size * 4,
            ("gather", "float32"): 2 * num_tokens * 4,
        }


def test_queries_keys_and_values_send_the_gradients_of_their_input_once(results: list[Result]) -> None:
    """So do gate and up: a block of a Llama sends as much as one of a GPT, whose queries, keys and values are one layer."""
    sizes = make_network("llama").sizes
    num_bytes = (4 * sizes.num_layers + 2) * 2 * 16 * sizes.hidden_size * 4
    assert [result["sent llama"]["sum", "float32"] for result in results] == [num_bytes] * NUM_RANKS


def test_what_is_shared_is_held_in_no_pause() -> None:
    """Layers that take other tensors share nothing, and passes without gradients neither take nor leave anything."""
    shared, axis = SharedInput(2), AxisInBlocks(Axis("tensor", 1, 0, torch.device("cpu")))
    first, second = (torch.zeros(2, requires_grad=True) for _ in range(2))
    copied = shared.to_shards(first, axis)
    assert shared.to_shards(first, axis) is copied
    assert shared.to_shards(first, axis) is not copied, "both layers had it: this is another pass"
    assert shared.to_shards(second, axis) is not shared.to_shards(first, axis)
    shared = SharedInput(2)
    copied = shared.to_shards(first, axis)
    with torch.no_grad():
        assert shared.to_shards(first, axis) is not copied
    assert shared.to_shards(first, axis) is copied


def test_a_pass_that_ended_between_two_layers_hinders_no_copy() -> None:
    """Autograd's tensors cannot be copied; the layers of a copy share an input of their own."""
    shared, axis = SharedInput(2), AxisInBlocks(Axis("tensor", 1, 0, torch.device("cpu")))
    input = torch.zeros(2, requires_grad=True)
    copied = shared.to_shards(input, axis)
    one, other = copy.deepcopy([shared, shared])
    assert one is other
    assert one.to_shards(input, axis) is not copied
    assert pickle.loads(pickle.dumps(shared)).to_shards(input, axis) is not copied  # noqa: S301  it was written here


def test_an_evaluation_counts_the_whole_vocabulary(results: list[Result]) -> None:
    model = make_network("llama").eval()
    with torch.no_grad():
        losses = model.loss(partly_ignored())
    assert 0.2 < float(losses.metrics["token_accuracy"]) < 0.5
    for result in results:
        expected = [float(losses.loss), float(losses.metrics["token_accuracy"]), losses.num_targets]
        assert result["evaluated"] == pytest.approx(expected, rel=1e-6)


def test_what_cannot_be_divided_is_refused() -> None:
    data = Axis("data", 1, 0, torch.device("cpu"))
    two, three = (Axes.of_data(data, {"tensor": Axis("tensor", size, 0, data.device)}) for size in (2, 3))
    model, optimizer = make("gpt", "O2")
    with pytest.raises(ValueError, match="matches no module"):
        cut_model(model, optimizer, two, {"blocks.*.mlp.left": "column"})
    with pytest.raises(ValueError, match="allowed: embeddings as embedding"):
        cut_model(model, optimizer, two, {"final_norm": "row"})
    with pytest.raises(ValueError, match="cannot be divided among 3 ranks"):
        cut_model(model, optimizer, three, plan_of(model))
    with pytest.raises(ValueError, match="has no plan for a tensor degree"):
        plan_of(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="allowed: column"):
        plan_of(model, {"head": "colwise"})
    with pytest.raises(ValueError, match="a divisor of the ranks"):
        parallelize(model, optimizer, tensor=2)
    with pytest.raises(ValueError, match="Use bf16-amp"):
        cut_model(*make("gpt", "fp16-amp"), two, plan_of(model))
    model.loss(batch_of(0, 0, 0)).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has taken 1 steps"):
        cut_model(model, optimizer, two, plan_of(model))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int8])
def test_shards_put_together_are_the_whole(groups: int, dim: int, dtype: torch.dtype) -> None:
    whole = torch.arange(24 * 12).remainder(100).view(24, 12).to(dtype)
    cut = Cut.of(whole, dim, groups, 2)
    shards = [cut.shard(whole, rank) for rank in range(2)]
    assert torch.equal(cut.join(shards).float(), whole.float())
    assert all(shard.is_contiguous() and shard.shape == cut.shape for shard in shards)
    assert cut.whole_shape == (24, 12)
