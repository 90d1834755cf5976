"""Sequence parallelism over two real ranks (gloo): codes, losses, gradients and norms of one process, and bytes on the wire.

`test_sequence_and_data.py` has all levels, data ranks, ZeRO and jobs.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas import Layout
from octet.worker import parallelize
from octet.worker.common.config import RankEnv
from octet.worker.fp8.operand import OperandScaling
from octet.worker.fp8.weight import tensors_in_memory
from octet.worker.mesh import Mesh
from octet.worker.mesh.axes import Axes
from octet.worker.models.llama import rotation
from octet.worker.parallel.sequence import check_sequence
from octet.worker.parallel.tokens import split_tokens
from tests.worker.parallel.compare import check_gradients, check_training, found_by_ranks
from tests.worker.parallel.tensor_runs import (
    Case,
    Result,
    batch_of,
    evaluated,
    gradients,
    make,
    make_network,
    parallel_on,
    partly_ignored,
    sent,
    trained,
)

NUM_RANKS = 2
NUM_SEQUENCES, NUM_TOKENS, HIDDEN_SIZE = 2, 16, 64


class Taken:
    """Keeps the codes of what a scaling's products over rows take, in both passes."""

    def __init__(self, scaling: OperandScaling) -> None:
        self.scaling, self.rows = scaling, []  # type: ignore[var-annotated]
        self.codes_before_product = scaling.codes_before_product
        scaling.codes_before_product = self  # type: ignore[method-assign, assignment]

    def __call__(self, x: Tensor, *arguments: Any, **options: Any) -> Any:
        codes, amax = self.codes_before_product(x, *arguments, **options)
        # Without codes the op of the product quantizes, by the same function.
        self.rows.append(self.scaling.quantize(x, amax=amax, columns=False)[0] if codes is None else codes[0])
        return codes, amax


def codes_of(model: nn.Module) -> dict[str, Tensor]:
    """Codes of the first block's inputs, and of the gradient of its MLP's output, in one step.

    In one process the value takes the codes that the query has made.
    """
    attention, mlp = model.blocks[0].attention, model.blocks[0].mlp  # type: ignore[index, union-attr]
    taken = {"query": Taken(attention.query.input_scaling), "value": Taken(attention.value.input_scaling)}
    taken["down"] = Taken(mlp.down.grad_output_scaling)
    model.loss(batch_of(0, 0, 0)).loss.backward()  # type: ignore[operator]
    return {name: kept.rows[-1].codes.view(torch.uint8) for name, kept in taken.items() if kept.rows}


def kept_bytes(axes: Axes, *, sequence: bool) -> int:
    """Bytes of activations that a block keeps for the backward pass."""
    model = parallel_on(axes, "llama", "O2", 0, sequence=sequence).model
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors_in_memory(model)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden = torch.randn(NUM_SEQUENCES, NUM_TOKENS, HIDDEN_SIZE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.blocks[0](hidden, rotation(NUM_TOKENS, 16, 1e4, hidden.device))  # type: ignore[index, operator]
    output.sum().backward()
    return sum(kept.values())


def dropped(axes: Axes) -> Tensor:
    """Which of its tokens' elements a rank drops inside of the blocks, and one number that is drawn afterwards."""
    model = parallel_on(axes, "llama", "fp32", 0, sequence=True).model
    found = []
    model.blocks[0].mlp_norm.register_forward_hook(
        lambda _module, _input, output: found.append(nn.functional.dropout(torch.ones_like(output))) or None
    )
    torch.manual_seed(0)
    model.loss(batch_of(0, 0, 0))
    return torch.cat((found[0].flatten(), torch.rand(1)))


def work(rank: int, ports: list[int], folder: str, _cases: list[Case]) -> None:
    torch.set_num_threads(1)
    with Mesh(RankEnv(rank=rank, world_size=2, master_port=ports[0]), torch.device("cpu"), Layout(2, tensor=2)) as mesh:
        axes = mesh
        found: Result = {"O3": trained(axes, "gpt", "O3", 0, sequence=True)}
        found["gradients"] = {family: gradients(axes, family, sequence=True) for family in ("gpt", "llama")}
        found["codes"] = codes_of(parallel_on(axes, "llama", "O2", 0, sequence=True).model)
        found["sent"] = {level: sent(axes, "llama", level, sequence=True) for level in ("O2", "bf16-amp")}
        found["kept"] = [kept_bytes(axes, sequence=sequence) for sequence in (False, True)]
        found |= {"evaluated": evaluated(axes, partly_ignored(), sequence=True), "dropped": dropped(axes)}
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Return each rank's results."""
    return found_by_ranks(work, NUM_RANKS, tmp_path_factory.mktemp("sequence"))


def test_ranks_train_as_one_process_does(results: list[Result]) -> None:
    """Scales of weights stay alike, and norms: each rank has the gradients of its tokens."""
    ranks = [result["O3"] for result in results]
    check_training(ranks, "gpt", "O3", 1)
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert ranks[0]["scales"]


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_gradients_are_those_of_one_process(results: list[Result], name: str) -> None:
    """Also of norms, of a row layer's bias and of positions."""
    check_gradients(results[0]["gradients"][name], name, [batch_of(0, 0, 0)])


def test_ranks_hold_the_codes_of_one_process(results: list[Result]) -> None:
    """Compare the gathered codes: the input that query and value share, and the gradient of the MLP's output.

    The input of the first block is the same to the bit. A few codes of the gradient differ: it has passed the bf16 head, which
    adds partial sums.
    """
    whole = codes_of(make("llama", "O2")[0])
    for result in results:
        assert torch.equal(result["codes"]["query"], whole["query"])
        assert torch.equal(result["codes"]["value"], whole["query"])
        assert torch.equal(result["codes"]["down"], results[0]["codes"]["down"])
        assert result["codes"]["down"].shape == whole["down"].shape == (NUM_SEQUENCES * NUM_TOKENS, HIDDEN_SIZE)
        assert (result["codes"]["down"] == whole["down"]).float().mean() > 0.95  # measured 0.976


def test_bytes_on_the_tensor_axis_are_those_of_the_formula(results: list[Result]) -> None:
    """FP8: codes of two inputs, gathered in both passes, and of two gradients. bf16-amp gathers an input once, in bf16.

    Values: tokens joined and split around the blocks, and of the head two numbers for each token; outputs of two rows and
    gradients of two inputs, added up. Whole on all ranks: the embedding's rows and the gradient of the head's input. The ranks
    agree on the amaxes of what travels in codes; norms' gradients are added up.
    """
    own = NUM_SEQUENCES * NUM_TOKENS * HIDDEN_SIZE // NUM_RANKS
    wide = 2 * own * 4 + 2 * NUM_SEQUENCES * NUM_TOKENS * 4
    exchanged = {("exchange", "float32"): 4 * own * 4, ("sum", "float32"): (2 * NUM_RANKS * own + 2 * HIDDEN_SIZE) * 4}
    codes = {("gather", "float8_e4m3fn"): 4 * own, ("gather", "float8_e5m2"): 2 * own, ("max", "float32"): 4 * 4}
    for result in results:
        assert result["sent"]["O2"] == exchanged | codes | {("gather", "float32"): wide}
        assert result["sent"]["bf16-amp"] == exchanged | {("gather", "bfloat16"): 4 * own * 2, ("gather", "float32"): wide}


def test_a_block_keeps_fewer_activations(results: list[Result]) -> None:
    """Norms' inputs and the codes of two inputs are of half the tokens, and layers share the codes. Measured: 0.71."""
    for result in results:
        whole, divided = result["kept"]
        assert divided < 0.75 * whole


def test_an_evaluation_reads_all_tokens(results: list[Result]) -> None:
    model = make_network("llama").eval()
    with torch.no_grad():
        losses = model.loss(partly_ignored())
    for result in results:
        expected = [float(losses.loss), float(losses.metrics["token_accuracy"]), losses.num_targets]
        assert result["evaluated"] == pytest.approx(expected, rel=1e-6)


def test_ranks_drop_other_elements_of_their_tokens(results: list[Result]) -> None:
    """Inside of the blocks. Afterwards all draw the same numbers again."""
    first, second = (result["dropped"] for result in results)
    assert first[:-1].shape == (NUM_SEQUENCES * NUM_TOKENS // NUM_RANKS * HIDDEN_SIZE,)
    assert 0.4 < (first[:-1] != second[:-1]).float().mean() < 0.6
    assert first[-1] == second[-1]


def test_what_leaves_no_whole_modules_is_refused() -> None:
    model, optimizer = make("gpt", "O2")
    check_sequence(model, {"blocks.0.mlp.up": "column", "blocks.0.mlp.down": "row"})
    with pytest.raises(ValueError, match="column layers or row layers alone"):
        check_sequence(model, {"blocks.0.mlp.up": "column"})
    with pytest.raises(ValueError, match="divided outside of a module of a block"):
        check_sequence(model, {"position_embedding": "column"})
    with pytest.raises(ValueError, match="repeats no blocks"):
        check_sequence(nn.Linear(2, 2), {})
    with pytest.raises(ValueError, match="sequence: got True; allowed: false with tensor 1"):
        parallelize(model, optimizer, sequence=True)
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        mesh.tensor.size = 3
        with pytest.raises(ValueError, match="a multiple of 3 tokens"):
            split_tokens(torch.ones(1, 16, 8), mesh.tensor)
