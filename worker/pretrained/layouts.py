"""Our own families under the names that transformers gives the same networks.

    llama   LlamaForCausalLM
    gpt     GPT2LMHeadModel, whose linear weights are (K, N); in FP8 GPTBigCodeForCausalLM without multi-query attention: the
            same network with `nn.Linear` layers, which alone compressed-tensors quantizes. Its rows of queries, keys and values
            are interleaved by head.

Both directions: a model's tensors are renamed and rearranged for a file, and a file's for a model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

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
