"""The architectures of transformers that a job can train, by the values that they predict.

Names are transformers' `model_type`. The control plane never imports transformers, so they stand here; a test compares them
with transformers' own tables. Encoder-decoders and models that need more than tokens or images are left out. A masked model is
never trained on next tokens, although transformers has classes for that: it sees the tokens that it should predict.
"""

from collections.abc import Mapping

from octet.api_schemas.inputs import Task


def _words(spaced: str) -> tuple[str, ...]:
    return tuple(spaced.split())


ARCHITECTURES: Mapping[Task, tuple[str, ...]] = {
    "next_token": _words(
        "afmoe apertus arcee bamba biogpt bloom codegen cohere cohere2 ctrl cwm dbrx deepseek_v2 deepseek_v3 diffllama "
        "doge dots1 ernie4_5 ernie4_5_moe exaone4 falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3_text glm "
        "glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granitemoe "
        "granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jamba jetmoe lfm2 lfm2_moe llama "
        "mamba mamba2 ministral mistral mixtral modernbert-decoder mpt nemotron olmo olmo2 olmo3 olmoe openai-gpt opt "
        "persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma seed_oss smollm3 stablelm "
        "starcoder2 xglm zamba2"
    ),
    "masked_token": _words(
        "albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie eurobert "
        "fnet ibert longformer megatron-bert mobilebert modernbert mpnet mra nomic_bert nystromformer rembert roberta "
        "roberta-prelayernorm roformer squeezebert xlm-roberta xlm-roberta-xl yoso"
    ),
    "image_class": _words(
        "beit bit convnext convnextv2 cvt data2vec-vision deit dinov2 dinov2_with_registers efficientnet focalnet "
        "hgnet_v2 hiera ijepa levit mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 poolformer pvt pvt_v2 regnet resnet "
        "swiftformer swin swinv2 vit vit_msn"
    ),
}

TASKS: Mapping[str, Task] = {name: task for task, names in ARCHITECTURES.items() for name in names}

POSITIONS_AFTER_PADDING = frozenset(
    _words("camembert data2vec-text ibert longformer mpnet roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl")
)
"""Architectures whose first position is the padding token's number plus one: positions below, 2 by default, are never used."""

DIVIDED_BY_RANKS = frozenset(
    _words(
        "arcee cohere cohere2 cwm ernie4_5 exaone4 gemma gemma2 gemma3_text gpt_neox granite helium llama ministral "
        "mistral olmo phi qwen2 qwen3 seed_oss smollm3 starcoder2"
    )
)
"""Architectures whose `base_model_tp_plan` divides layers by columns and rows alone, which a tensor degree needs."""

KEEPS_DOCUMENTS_APART = frozenset(
    _words(
        "apertus arcee cohere cohere2 cwm deepseek_v3 diffllama ernie4_5 ernie4_5_moe exaone4 flex_olmo gemma gemma2 "
        "gemma3_text glm glm4 glm4_moe gpt2 gpt_neox granite granitemoe granitemoeshared llama mistral mixtral nemotron olmo "
        "olmo2 olmo3 olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2"
    )
)
"""Decoders that attend by our function, which documents end; `tests/worker/models/test_documents.py` measures each."""

PURE_BLOCK_CLASSES: Mapping[str, str] = {
    "gpt2": "GPT2Block",
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "vit": "ViTLayer",
}
"""Classes of blocks that change no norm's output in place, by architecture; for ours see `Capabilities.pure_blocks`."""

GATED_MLP_CLASSES: Mapping[str, str] = {
    "gemma": "GemmaMLP",
    "gemma2": "Gemma2MLP",
    "llama": "LlamaMLP",
    "mistral": "MistralMLP",
    "olmo2": "Olmo2MLP",
    "qwen2": "Qwen2MLP",
    "qwen3": "Qwen3MLP",
    "smollm3": "SmolLM3MLP",
}
"""Classes that compute down_proj(act_fn(gate_proj(x)) * up_proj(x)), by architecture; for ours `Capabilities.gated_mlp`."""
