"""A model that is drawn from its configuration starts by shard: the same values on any ranks, and no rank ever holds it all."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from octet import draw_model, load_checkpoint, memory_report, parallelize, plain_state_dict, save_checkpoint
from octet.api_schemas.models import LlamaSpec
from octet.worker.fp8 import weights
from octet.worker.fp8.weight import is_float8_weight
from octet.worker.models import build_model
from octet.worker.parallel import Parallel
from octet.worker.parallel import parallelize as parallelize_module
from octet.worker.parallel.materialize import needed_bytes
from tests.kit.live_storages import LiveStorages
from tests.kit.ports import free_port
from tests.kit.pretrained_models import TOKENS
from tests.kit.ranks import run_ranks, saved_by_ranks

LEVELS = ("bf16-amp", "te", "O2", "O3", "O3-split")
LAYOUTS: dict[str, dict[str, Any]] = {"zero 3": {"zero_stage": 3}, "zero 1": {"zero_stage": 1}, "tensor": {"tensor": 2}}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LARGEST = 256 * 64
"""Elements of the largest parameter of these models."""
NUM_TEMPORARIES = 3
"""Tensors of the largest parameter in fp32 that are alive at once, as when a folder is read."""


def their_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=256, max_position_embeddings=32, use_cache=False))


def their_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=32, vocab_size=256, use_cache=False))


def our_llama() -> nn.Module:
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 256}
    return build_model(LlamaSpec(**sizes, num_key_value_heads=2, max_sequence_length=32), seed=0)


class Net(nn.Module):
    """Blocks of torch's layers, which draw what they hold by `reset_parameters`; the last draws its layer once more."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(256, 64), nn.LayerNorm(64), nn.Linear(64, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embedding(tokens_BT)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.down.weight, std=0.002)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": their_llama, "gpt2": their_gpt2, "ours": our_llama, "torch": Net}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def start(name: str, level: str, **layout: Any) -> Parallel:
    model, optimizer = draw_model(MODELS[name], level, make_optimizer=adamw, seed=3, exclude=("*head",))
    return parallelize(model, optimizer, **layout)


def step(parallel: Parallel) -> None:
    """Train one step on the same tokens on every rank."""
    logits_BTV = parallel.model(TOKENS % 256)
    logits_BTV = logits_BTV if isinstance(logits_BTV, Tensor) else logits_BTV.logits
    nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), TOKENS.flatten() % 256).backward()
    parallel.clip_grad_norm_(1.0)
    parallel.optimizer.step()
    parallel.optimizer.zero_grad()


def values_of(parallel: Parallel) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in plain_state_dict(parallel.model).items()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.matrix if name == "llama" else ()) for name in MODELS])
def test_values_are_distributed_as_the_classes_draw_them(name: str) -> None:
    torch.manual_seed(0)
    whole = {key: parameter.detach() for key, parameter in MODELS[name]().named_parameters()}
    found, encoded = (values_of(start(name, level)) for level in ("fp32", "O2"))
    for key, values in whole.items():
        drawn, deviation = found[key], float(values.std(correction=0))
        assert drawn.shape == values.shape
        assert float(drawn.std(correction=0)) == pytest.approx(deviation, rel=0.25, abs=1e-6)
        assert float(drawn.mean()) == pytest.approx(float(values.mean()), abs=0.25 * deviation + 1e-6)
        torch.testing.assert_close(encoded[key], drawn, rtol=2**-10, atol=2**-12)
        assert torch.equal(drawn, values) != bool(deviation)  # another seed
    if name == "ours":
        sizes = {"num_layers": 2, "num_heads": 4, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 256}
        of_a_job = build_model(LlamaSpec(**sizes, num_key_value_heads=2, max_sequence_length=32), seed=3)
        assert all(torch.equal(found[key], parameter) for key, parameter in of_a_job.named_parameters())


def test_tied_parameters_are_drawn_once() -> None:
    parallel = start("gpt2", "O2")
    assert parallel.model.lm_head.weight is parallel.model.transformer.wte.weight


class Attends(nn.Module):
    """torch's own attention, which keeps queries, keys and values in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True) for _ in range(2))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embedding(tokens_BT)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def their_mixture() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, vocab_size=256, max_position_embeddings=32, use_cache=False)
    )


@pytest.mark.parametrize("build", [Attends, pytest.param(their_mixture, marks=pytest.mark.matrix)])
def test_matrices_of_one_parameter_are_drawn_together(build: Callable[[], nn.Module]) -> None:
    """So they are the same at a level that takes them apart."""
    found = []
    for level in ("fp32", "O2"):
        parallel = parallelize(*draw_model(build, level, make_optimizer=adamw, seed=3, exclude=("*head",)))
        found.append(values_of(parallel))
        step(parallel)
    weights_by_name = dict(parallel.model.named_parameters())
    assert all(is_float8_weight(held) for name, held in weights_by_name.items() if ".in_proj." in name and held.dim() > 1)
    assert found[0].keys() == found[1].keys() == dict(build().named_parameters()).keys()
    for name, values in found[0].items():
        torch.testing.assert_close(found[1][name], values, rtol=2**-10, atol=2**-12)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(64, 64), nn.Parameter(torch.ones(64))


class Half(Bare):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.layer.weight)


def on_meta() -> nn.Module:
    """Buffers, too, have no values."""
    with torch.device("meta"):
        network: nn.Module = their_llama()
    return network


def test_what_nobody_draws_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot draw scale of Bare; allowed: modules with reset_parameters"):
        draw_model(Bare, "O2", make_optimizer=adamw)
    with pytest.raises(ValueError, match="Half does not draw scale in reset_parameters"):
        parallelize(*draw_model(Half, "O2", make_optimizer=adamw))
    with pytest.raises(ValueError, match="draw_model is called at level ao; allowed: other levels"):
        draw_model(Net, "ao", make_optimizer=adamw)
    with pytest.raises(
        ValueError, match="draw_model is called and the optimizer is SGD; allowed: one that initialize takes over"
    ):
        draw_model(Net, "te", make_optimizer=lambda model: torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="Let `build` make the model without a device of its own"):
        draw_model(on_meta, "O2", make_optimizer=adamw)
    model, _ = draw_model(Net, "O2", make_optimizer=adamw)
    with pytest.raises(RuntimeError, match=r"no values yet: .* Call octet\.parallelize"):
        model(TOKENS)


def run(rank: int, name: str, level: str, layout: str, folder: str) -> dict[str, Any]:
    """Start and count, train two steps, save, and go on."""
    gc.collect()
    with mock.patch.object(weights, "PIECE_ELEMENTS", 1 << 11), LiveStorages() as live:
        parallel = start(name, level, **LAYOUTS[layout])
    found: dict[str, Any] = {"peak": live.peak_bytes, "held": sum(memory_report(parallel.model, parallel.optimizer).values())}
    found["start"] = values_of(parallel)
    for _ in range(2):
        step(parallel)
    save_checkpoint(parallel, Path(folder, f"{name} {level} {layout}"), 2, {"position": 7})
    step(parallel)
    return found | {"third": values_of(parallel)}


def on_ranks(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for name in MODELS:
        for level in LEVELS if name == "llama" else ("O3",):
            for layout in LAYOUTS if name in ("llama", "ours") else ("zero 3", "zero 1"):
                found[f"{name} {level} {layout}"] = run(rank, name, level, layout, folder)
    for level in LEVELS:
        for saved, layout in [("zero 3", "zero 3"), ("zero 3", "tensor"), ("tensor", "zero 1")]:
            again = start("llama", level, **LAYOUTS[layout])
            loaded = load_checkpoint(again, Path(folder, f"llama {level} {saved}"))
            step(again)
            found[f"llama {level} {saved} in {layout}"] = {"loaded": loaded, "third": values_of(again)}
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.system
def test_ranks_draw_what_one_process_draws_and_go_on_in_any_layout(tmp_path: Path) -> None:
    run_ranks(on_ranks, (free_port(), str(tmp_path)), 2)
    starts = {(name, level): values_of(start(name, level)) for name in MODELS for level in LEVELS}
    for found in saved_by_ranks(tmp_path, 2):
        for case, result in found.items():
            name, level, layout, *to = case.replace("zero ", "zero-").split()
            if to:
                assert result["loaded"] == (2, {"position": 7})
                expected = found[f"{name} {level} {layout.replace('-', ' ')}"]["third"]
                for key, values in expected.items():
                    if layout == to[-1]:
                        assert torch.equal(result["third"][key], values), (case, key)
                    torch.testing.assert_close(result["third"][key], values, rtol=0.05, atol=6e-3)
                continue
            for key, values in starts[name, level].items():
                assert torch.equal(result["start"][key], values), (case, key)
            assert result["held"] <= result["peak"] <= result["held"] + NUM_TEMPORARIES * 4 * LARGEST, case


SCALED = {"num_layers": 8, "num_heads": 4, "num_key_value_heads": 2, "hidden_size": 256, "intermediate_size": 768}
SCALED |= {"vocab_size": 512, "max_sequence_length": 16}
OF_8B = {"num_layers": 32, "num_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14_336}
OF_8B |= {"vocab_size": 128_256, "max_sequence_length": 16}
PER_ELEMENT = {"O2": 2 + 1 + 2, "O3": 1 + 2 + 1 + 2, "O3-split": 1 + 1 + 1 + 2}
"""Bytes of a converted layer's element between steps: codes, what refines them, both moments."""


def elements_of(sizes: dict[str, Any]) -> tuple[int, int, int]:
    """Return the elements of a block's matrices, of all blocks' norms and the last, and of embedding and head."""
    width, inner, num_layers = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_layers"]
    heads = sizes["num_heads"] + 2 * sizes["num_key_value_heads"] + sizes["num_heads"]
    block = heads * width // sizes["num_heads"] * width + 3 * inner * width
    return block, (2 * num_layers + 1) * width, 2 * sizes["vocab_size"] * width


def share_of(sizes: dict[str, Any], level: str, num_ranks: int) -> float:
    """Return the bytes that a rank holds at ZeRO 3: its share of blocks, embedding and head, and of all states."""
    block, norms, ends = elements_of(sizes)
    divided = sizes["num_layers"] * block * PER_ELEMENT[level] + norms * 12 + ends * (4 + 3)
    return divided / num_ranks


def draw_llama(sizes: dict[str, Any], level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    return draw_model(lambda: build_model(LlamaSpec(**sizes), seed=0), level, make_optimizer=adamw, auto_filter=False)


def own_loop(level: str) -> dict[str, float]:
    """Start, train and save as one's own loop does, and count every storage of this rank."""
    gc.collect()
    with mock.patch.object(weights, "PIECE_ELEMENTS", 1 << 11), LiveStorages() as live:
        parallel = parallelize(*draw_llama(SCALED, level), zero_stage=3)
        found: dict[str, float] = {"start": live.peak_bytes}
        found["held"] = sum(memory_report(parallel.model, parallel.optimizer).values())
        live.peak_bytes, tokens_BT = 0, TOKENS[:1, :8] % SCALED["vocab_size"]
        for _ in range(2):
            parallel.model.loss({"tokens": tokens_BT, "targets": tokens_BT}).loss.backward()  # type: ignore[operator]
            gradients = memory_report(parallel.model, parallel.optimizer)["gradients"]
            parallel.optimizer.step()
            parallel.optimizer.zero_grad()
        found |= {"training": live.peak_bytes, "gradients": gradients}
    return found


def on_four_ranks(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    torch.save({level: own_loop(level) for level in PER_ELEMENT}, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.system
def test_no_rank_of_four_holds_more_than_its_share_and_a_block(tmp_path: Path) -> None:
    """Counted for a Llama of 6.6 million parameters. In training a block is its codes, and its gradients in fp32.

    Besides there are the fp32 gradients of embedding and head, and one of a matrix that is encoded.
    """
    run_ranks(on_four_ranks, (free_port(), str(tmp_path)), 4)
    block, _, ends = elements_of(SCALED)
    matrix = SCALED["hidden_size"] * SCALED["intermediate_size"]
    for ranks in saved_by_ranks(tmp_path, 4):
        for level, found in ranks.items():
            gathered = (4 + (2 if level == "O2" else 1)) * block
            assert found["held"] == pytest.approx(share_of(SCALED, level, 4), rel=0.03), level
            assert found["start"] <= found["held"] + 4 * block, level
            assert found["training"] <= found["held"] + found["gradients"] + gathered + 4 * (ends + matrix), level


@pytest.mark.system
@pytest.mark.parametrize("level", PER_ELEMENT)
def test_a_rank_of_four_needs_its_share_of_a_llama_of_8_billion(level: str) -> None:
    """Divided over four fake ranks, and not filled: `needed_bytes` adds up what this rank will hold."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        with mock.patch.object(parallelize_module, "fill_now"), LiveStorages() as live:
            model, optimizer = draw_llama(OF_8B, level)
            parallel = parallelize(model, optimizer, zero_stage=3)
        needed = needed_bytes(model, optimizer, parallel)  # type: ignore[arg-type]  # an optimizer of ours
    finally:
        dist.destroy_process_group()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == pytest.approx(8.03e9, rel=1e-3)
    assert needed == pytest.approx(share_of(OF_8B, level, 4), rel=0.03)
    assert live.num_bytes <= live.peak_bytes <= needed
    block, _, _ = elements_of(OF_8B)
    assert needed + 6 * block < 0.55 * 4 * num_parameters  # fp32 weights alone, whole
