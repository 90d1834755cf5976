"""Small trained models for tests of export and import: our families and transformers' Llama, and how they are compared."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from octet.api_schemas import GPTSizes
from octet.api_schemas.models.llama import LlamaSizes
from octet.worker import initialize
from octet.worker.models.gpt import GPT
from octet.worker.models.llama import Llama

VOCABULARY = 96
TOKENS = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))


def our_llama() -> nn.Module:
    """128 wide: a whole block and a part of one in each direction; its rotary base is not transformers' default."""
    return Llama(
        LlamaSizes(
            hidden_size=128,
            intermediate_size=192,
            num_layers=2,
            num_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_sequence_length=32,
            rope_theta=500_000.0,
            tie_embeddings=False,
        )
    )


def our_tied_llama() -> nn.Module:
    sizes = our_llama().sizes.model_copy(update={"tie_embeddings": True})
    return Llama(sizes)


def our_gpt() -> nn.Module:
    return GPT(GPTSizes(hidden_size=64, num_layers=2, num_heads=4, vocab_size=VOCABULARY, max_sequence_length=32))


def their_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=32))


def their_mixture(**changes: int) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 80} | changes
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, vocab_size=VOCABULARY, max_position_embeddings=32))


FAMILIES = {
    "llama": our_llama,
    "tied llama": our_tied_llama,
    "gpt": our_gpt,
    "transformers' llama": their_llama,
    "their mixture": their_mixture,
}


def trained(build: Callable[[], nn.Module], level: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after five steps at a level that evaluates in bf16."""
    model = build()
    if level not in ("fp32", "bf16-amp", "fp16-amp", "ao"):
        options["recipe"] = {"fp8_in_evaluation": False, **options.get("recipe", {})}
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), level, **options)
    for _ in range(5):
        logits = logits_of(model).float()
        nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), optimizer


@cache
def shared(build: Callable[[], nn.Module], level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`trained`, once for all tests of a file that only read the model and the optimizer."""
    return trained(build, level)


def logits_of(model: nn.Module) -> Tensor:
    """The logits of TOKENS."""
    output = model(TOKENS)
    return output if isinstance(output, Tensor) else output.logits


def from_pretrained(folder: Path) -> nn.Module:
    """Load a model with transformers, in fp32. Nothing may be missing or unexpected."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def split_into_files(folder: Path) -> None:
    """Give each tensor a file of its own, with an index: torch counts the whole file that a tensor is read from as memory."""
    tensors, weight_map = tensors_in(folder), {}
    (folder / "model.safetensors").unlink()
    for number, (name, tensor) in enumerate(tensors.items()):
        weight_map[name] = f"part_{number}.safetensors"
        save_file({name: tensor}, folder / weight_map[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
