"""Networks of transformers divided by their own plans: the loss and the gradients of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from octet.api_schemas.models.architectures import ARCHITECTURES, DIVIDED_BY_RANKS
from octet.worker import initialize, parallelize
from octet.worker.mesh import Axes
from octet.worker.models.huggingface import transformers
from octet.worker.models.wrapped import wrap
from octet.worker.parallel.tensor import cut_model
from octet.worker.parallel.tensor_plan import check_heads, plan_of
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.matrix
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS_OF_16 = ("exaone4", "gemma", "gemma2", "gemma3_text", "helium", "ministral", "mistral", "qwen3", "seed_oss")
GRADIENT_ERROR = 5e-6
"""Largest error relative to a parameter's largest gradient, in fp32. Measured: at most 1.3e-6 (helium's queries)."""


def network_of(architecture: str) -> Any:
    config_class = transformers().CONFIG_MAPPING[architecture]
    sizes = SMALL | ({"head_dim": 16} if architecture in HEADS_OF_16 else {})
    sizes |= {"residual_dropout": 0.0} if architecture == "seed_oss" else {}
    torch.manual_seed(0)
    config = config_class(**sizes, attention_dropout=0.0)
    return transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def batch_of() -> dict[str, Tensor]:
    tokens = torch.randint(3, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def divided(architecture: str, device: torch.device, *, sequence: bool) -> dict[str, Any]:
    """The loss, and whole gradients, of our wrapper, whose head is divided, too."""
    model, axes = wrap(network_of(architecture), "next_token"), Axes.of_group(device, tensor=2)
    optimizer = torch.optim.AdamW(model.parameters())
    shards = cut_model(model, optimizer, axes, plan_of(model), sequence=sequence)
    loss = model.loss(batch_of()).loss
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        cut, parts = shards.cuts.get(parameter), axes.tensor.start_gather(parameter.grad).wait()
        gradients[name] = parts[0] if cut is None else cut.join(list(parts))
    return {"loss": float(loss.detach()), "gradients": gradients, "num_cut": len(shards.cuts)}


def own_loop(level: str, *, sequence: bool = False) -> list[float]:
    """Losses of a plain network in a loop of one's own, whose head stays whole."""
    network = network_of("llama")
    model, optimizer = initialize(network, torch.optim.AdamW(network.parameters(), lr=1e-3), level)
    assert optimizer is not None
    if dist.is_initialized():
        parallelize(model, optimizer, tensor=2, sequence=sequence)
    losses = []
    batch = batch_of()
    for _ in range(3):
        logits = model(input_ids=batch["tokens"]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found: dict[Any, Any] = {
        (name, sequence): divided(name, torch.device("cpu"), sequence=sequence)
        for name in sorted(DIVIDED_BY_RANKS)
        for sequence in (False, True)
    }
    found["own loop"] = {
        (level, sequence): own_loop(level, sequence=sequence) for level in ("fp32", "O2") for sequence in (False, True)
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("plans")
    run_ranks(work, (free_port(), str(folder)), 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("architecture", sorted(DIVIDED_BY_RANKS))
def test_loss_and_gradients_are_those_of_one_process(results: list[dict[Any, Any]], architecture: str, sequence: bool) -> None:
    model = wrap(network_of(architecture), "next_token")
    loss = model.loss(batch_of()).loss
    loss.backward()
    for result in results:
        found = result[architecture, sequence]
        assert found["num_cut"] >= 2 * 4 + 1  # of each block at least four weights, and the embedding
        assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            error = (found["gradients"][name] - parameter.grad).abs().max() / parameter.grad.abs().max().clamp(min=1e-12)
            assert float(error) < GRADIENT_ERROR, name


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("level", ["fp32", "O2"])
def test_a_loop_of_ones_own_trains_by_transformers_plan(results: list[dict[Any, Any]], level: str, sequence: bool) -> None:
    expected = own_loop(level)
    assert expected[-1] < expected[0]
    for result in results:
        assert result["own loop"][level, sequence] == pytest.approx(expected, rel=1e-6 if level == "fp32" else 6e-4)


def test_the_table_of_architectures_is_transformers_own() -> None:
    known = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
    mapping = transformers().CONFIG_MAPPING
    plans = {
        name: getattr(mapping[name], "base_model_tp_plan", None) for name in ARCHITECTURES["next_token"] if name in mapping
    }
    divided_alone = {name for name, plan in plans.items() if plan and set(plan.values()) <= known}
    left_out = {"apertus", "qwen2_moe"}  # an activation with weights of its own, and experts that lie in one tensor
    assert divided_alone - DIVIDED_BY_RANKS == left_out
    assert divided_alone >= DIVIDED_BY_RANKS


def test_fewer_heads_than_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="num_key_value_heads is 2 and the tensor degree 4"):
        check_heads(network_of("llama"), 4)
