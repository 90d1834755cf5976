"""Our own families under the names that transformers gives the same networks.

    llama   LlamaForCausalLM
    gpt     GPT2LMHeadModel, whose linear weights are (K, N); in FP8 GPTBigCodeForCausalLM without multi-query attention: the
            same network with `nn.Linear` layers, which alone compressed-tensors quantizes. Its rows of queries, keys and values
            are interleaved by head.

Both directions: a model's tensors are renamed and rearranged for a file, and a file's for a model.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octet.worker.fp8.stacks import stacks_of
from octet.worker.models.gpt import GPT
from octet.worker.models.llama import Llama
from octet.worker.models.wrapped import WrappedModel
from octet.worker.prepare.export_state_dict import join

_LLAMA_NAMES = {
    "token_embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_GPT_NAMES = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "blocks": "transformer.h",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}

Rearrange = Callable[[str, Tensor], Tensor]
"""Takes our name of a tensor and the tensor; returns a view or a copy in the other layout."""


def _as_it_is(_name: str, tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Layout:
    """The form in which a network is written. config: `config.json`, None for a model of transformers, which writes its own.

    prefix: begins the name of each module of the model, and no name of the file.
    """

    config: Mapping[str, Any] | None = None
    prefix: str = ""
    names: Mapping[str, str] | None = None
    to_file: Rearrange = _as_it_is
    from_file: Rearrange = _as_it_is

    def rename(self, tensor_name: str) -> str:
        """Return the file's name of a tensor, given the model's."""
        module, _, tensor = tensor_name.rpartition(".")
        return join(self.rename_module(module), tensor)

    def rename_module(self, name: str) -> str:
        """Return the file's name of a module, given the model's."""
        if self.names is None:
            return f"{name}.".removeprefix(self.prefix).removesuffix(".")
        if not name.startswith("blocks."):
            return self.names[name]
        _, number, rest = name.split(".", 2)
        return f"{self.names['blocks']}.{number}.{self.names[rest]}"


def layout_of_model(model: nn.Module, *, in_fp8: bool) -> Layout:
    """Return the layout of a model: that of its family, or, for any other model, its own names and tensors.

    in_fp8: the layout in which FP8 weights are written.
    """
    if isinstance(model, Llama):
        return Layout(_llama_config(model), names=_LLAMA_NAMES)
    if isinstance(model, GPT):
        num_heads = model.sizes.num_heads
        if in_fp8:
            return Layout(
                _big_code_config(model),
                "",
                _GPT_NAMES,
                lambda name, tensor: _interleave(tensor, (3, num_heads)) if "attention.qkv" in name else tensor,
                lambda name, tensor: _interleave(tensor, (num_heads, 3)) if "attention.qkv" in name else tensor,
            )
        return Layout(_gpt2_config(model), "", _GPT_NAMES, _transpose_linear, _transpose_linear)
    return Layout(prefix="network.") if isinstance(model, WrappedModel) else Layout()


def layout_in_file(model: nn.Module, config: Mapping[str, Any]) -> Layout:
    """Return the layout of a model in a folder that has this `config.json`. ValueError where it holds another network."""
    candidates = [layout_of_model(model, in_fp8=in_fp8) for in_fp8 in (False, True)]
    if candidates[0].config is None:
        return candidates[0]
    found = config.get("model_type")
    for layout in candidates:
        assert layout.config is not None
        if layout.config["model_type"] == found:
            return layout
    allowed = ", ".join(dict.fromkeys(str(layout.config["model_type"]) for layout in candidates if layout.config is not None))
    raise ValueError(
        f"config.json has model_type {found!r}; allowed for {type(model).__name__}: {allowed}. Name the folder of such a model."
    )


class Part(NamedTuple):
    """A tensor of a file that is one of the model, or rows of it. matrix: its number, if the tensor is a stack of them."""

    name: str
    matrix: int | None = None


class Place(NamedTuple):
    """The parts of a tensor of the model in files: joined by rows, and, if `is_stack`, matrix by matrix."""

    matrices: tuple[tuple[Part, ...], ...]
    is_stack: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts."""
        return tuple(part for parts in self.matrices for part in parts)


def places_in_file(model: nn.Module, layout: Layout) -> Callable[[str, torch.Size], Iterator[Place]]:
    """Return what lists the places where files may have a tensor, given the model's name and its shape."""
    names = NamesOfTransformers(model)
    stacks = {part: (stack.name, index) for stack in stacks_of(model) for index, part in enumerate(stack.parts)}

    def of_expert(stacked: str, index: int) -> tuple[Part, ...]:
        return tuple(Part(names.in_file(part)) for part in names.of_expert(stacked, index))

    def places_of(name: str, shape: torch.Size) -> Iterator[Place]:
        stacked, index = stacks.get(name, (name, None))
        theirs = layout.rename(stacked)
        for whole in dict.fromkeys((theirs, names.in_file(theirs))):
            yield Place(((Part(whole, index),),))
        if index is not None:
            yield Place((of_expert(theirs, index),))
        elif len(shape) == 3:
            yield Place(tuple(of_expert(theirs, number) for number in range(shape[0])), is_stack=True)

    return places_of


def experts_in_file(model: nn.Module, layout: Layout) -> dict[str, list[str]]:
    """Return, by the model's name of an expert's layer, the names of the matrices that it is written as, by rows.

    None are listed where transformers saves stacks. The names are those before transformers renames them.
    """
    names, found = NamesOfTransformers(model), dict[str, list[str]]()
    for stack in stacks_of(model):
        for index, part in enumerate(stack.parts):
            if part.endswith(".weight"):
                found[part.removesuffix(".weight")] = names.of_expert(layout.rename(stack.name), index)
    return found


class NamesOfTransformers:
    """The names under which transformers saves the tensors of a network that it joins or renames when it loads them."""

    def __init__(self, model: nn.Module) -> None:
        network = model.network if isinstance(model, WrappedModel) else model
        changes = _changes_of_names(network)
        self._renamings = [change.reverse_transform() for change in reversed(changes) if not hasattr(change, "operations")]
        self._joined = [change for change in changes if hasattr(change, "operations") and _joins_experts(change)]

    def in_file(self, name: str) -> str:
        """Return the name in a file of a tensor, given the network's."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def of_expert(self, stacked: str, index: int) -> list[str]:
        """Return the names of the matrices, by rows, that one expert's matrix is joined of; none where stacks are saved.

        stacked: the network's name. The names are still to be given to `in_file`.
        """
        for change in self._joined:
            [target] = change._original_target_patterns
            if stacked.endswith(target):
                before = stacked.removesuffix(target)
                return [before + source.replace("*", str(index)) for source in change._original_source_patterns]
        return []


def _changes_of_names(network: Any) -> list[Any]:
    """Return transformers' changes between files and a network; none for other networks."""
    if not callable(getattr(type(network), "save_pretrained", None)):
        return []
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
    except ModuleNotFoundError:
        return []
    changes: list[Any] = mapping.get_model_conversion_mapping(network, add_legacy=False)
    return [change for change in changes if type(change).__name__ != "PrefixChange"]


def _joins_experts(change: Any) -> bool:
    """Return True for a change that only stacks matrices by expert, and joins those of one expert by rows."""
    operations = [(type(operation).__name__, operation.dim) for operation in change.operations if hasattr(operation, "dim")]
    expected = [("MergeModulelist", 0), ("Concatenate", 1)][: 1 if len(change._original_source_patterns) == 1 else 2]
    sources = change._original_source_patterns
    return (
        operations == expected
        and len(operations) == len(change.operations)
        and len(change._original_target_patterns) == 1
        and all(source.count("*") == 1 for source in sources)
    )


def _interleave(tensor: Tensor, groups: tuple[int, int]) -> Tensor:
    """Exchange the order of two groupings of the rows: (a, b, rows of a head, …) becomes (b, a, rows of a head, …)."""
    rows = tensor.reshape(*groups, -1, *tensor.shape[1:])
    return rows.transpose(0, 1).reshape(tensor.shape)


def _transpose_linear(name: str, tensor: Tensor) -> Tensor:
    """Transpose the weights of linear layers in blocks: GPT-2 holds them as (K, N)."""
    return tensor.t() if name.startswith("blocks.") and tensor.dim() == 2 else tensor


def _llama_config(model: Llama) -> dict[str, Any]:
    sizes = model.sizes
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_size,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_sequence_length,
        "rope_theta": sizes.rope_theta,
        "rms_norm_eps": model.final_norm.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": sizes.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _gpt2_config(model: GPT) -> dict[str, Any]:
    sizes = model.sizes
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": sizes.hidden_size,
        "n_layer": sizes.num_layers,
        "n_head": sizes.num_heads,
        "n_positions": sizes.max_sequence_length,
        "vocab_size": sizes.vocab_size,
        "activation_function": "gelu_pytorch_tanh",
        "layer_norm_epsilon": model.final_norm.eps,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _big_code_config(model: GPT) -> dict[str, Any]:
    return _gpt2_config(model) | {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        "multi_query": False,
    }
