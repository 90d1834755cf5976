"""The architectures in most use convert, learn in 20 steps at O2, are exported and loaded again.

Three run in `make test`, the rest as a matrix.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from octet.api_schemas import TokenInput
from octet.api_schemas.models.architectures import TASKS
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.api_schemas.precision import PrecisionSpec
from octet.worker import export, fuse_loss, plain_state_dict
from octet.worker.common.errors import InvalidConfig
from octet.worker.fp8.convert import ConversionReport
from octet.worker.fp8.experts import unstack_experts
from octet.worker.fp8.layout import layout_of
from octet.worker.fp8.weight import is_float8_weight
from octet.worker.models import build_model
from octet.worker.models.huggingface import AUTO_CLASSES, transformers
from octet.worker.models.linear_cross_entropy import DeferredLogits
from octet.worker.models.wrapped import wrap
from octet.worker.prepare.initialize import initialize
from octet.worker.pretrained.load import load_pretrained
from octet.worker.train.reports import conversion_events
from tests.kit.text import text

NUM_STEPS, BATCH_SIZE, LENGTH, VOCABULARY = 20, 8, 32, 272
MASK = VOCABULARY - 1

WIDE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = WIDE | {"vocab_size": VOCABULARY, "intermediate_size": 128, "max_position_embeddings": 64}
GROUPED = DECODER | {"num_key_value_heads": 2}
UNPADDED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = DECODER | NO_DROPOUT

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED | {"head_dim": 16},
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 16},
    "gemma2": GROUPED | {"head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": GROUPED | {"head_dim": 16, "query_pre_attn_scalar": 16},
    "phi3": GROUPED | UNPADDED | {"original_max_position_embeddings": 64},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": DECODER,
    "opt": WIDE
    | {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
    | {"word_embed_proj_dim": 64, "ffn_dim": 128, "dropout": 0.0},
    "falcon": WIDE | {"vocab_size": VOCABULARY},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "hidden_dropout": 0.0},
    "olmo2": GROUPED | UNPADDED,
    "granite": GROUPED,
    "stablelm": GROUPED,
    "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": GROUPED | EXPERTS | {"head_dim": 16, "decoder_sparse_step": 1},
    "olmoe": GROUPED | UNPADDED | {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": DECODER
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 2, "topk_group": 1}
    | {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    | {"first_k_dense_replace": 1},
    "gpt_oss": GROUPED
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "roberta": ENCODER | {"max_position_embeddings": 66},
    "bert": ENCODER,
    "deberta-v2": ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16},
    "vit": WIDE | NO_DROPOUT | {"intermediate_size": 128, "image_size": 16, "patch_size": 4, "num_labels": 4},
    "swin": {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 16, "patch_size": 2}
    | {"num_labels": 4, "drop_path_rate": 0.0},
}
MARKS = {"qwen3": (), "deberta-v2": pytest.mark.system, "gpt2": pytest.mark.system}
"""Three kinds: a decoder with all recent features, an encoder with its own attention, and a network of Conv1D layers."""
LEARNED = 0.9
WITH_OTHER_LOGITS = {"gemma2": "a division", "granite": "a division", "cohere": "a multiplication"}
"""Architectures that compute with what their head returns."""


def batch_of(architecture: str) -> dict[str, Tensor]:
    """One batch: text for language models, images that are bright in one of three channels or dark for the others."""
    generator = torch.Generator().manual_seed(0)
    if TASKS[architecture] == "image_class":
        labels = torch.arange(BATCH_SIZE) % 4
        images = torch.randn(BATCH_SIZE, 3, 16, 16, generator=generator)
        for image, label in zip(images, labels.tolist(), strict=True):
            image[:label] += 2.0
        return {"images": images, "labels": labels}
    rows = torch.tensor(list(text(40).encode())[: BATCH_SIZE * (LENGTH + 1)]).view(BATCH_SIZE, LENGTH + 1)
    if TASKS[architecture] == "next_token":
        return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}
    positions = torch.rand(BATCH_SIZE, LENGTH, generator=generator).argsort(1)[:, :5].sort(1).values
    targets = rows.gather(1, positions)
    return {"tokens": rows.scatter(1, positions, MASK)[:, :LENGTH].contiguous(), "positions": positions, "targets": targets}


def parameters() -> list[Any]:
    return [pytest.param(name, marks=MARKS.get(name, pytest.mark.matrix)) for name in CONFIGS]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # transformers' DeBERTa, when it is imported
@pytest.mark.parametrize("architecture", parameters())
def test_it_converts_learns_and_is_exported(architecture: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = build_model(HuggingFaceSpec(architecture=architecture, config=CONFIGS[architecture]), seed=0)
    batch = batch_of(architecture)
    unstack_experts(model, PrecisionSpec(level="O2"))
    linears = {name for name, module in model.named_modules() if layout_of(module) is not None}
    trained, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), "O2")
    assert optimizer is not None
    report = trained.octet_report
    assert isinstance(report, ConversionReport)
    assert set(report.converted) | {layer.name for layer in report.skipped} == linears
    assert len(report.converted) >= 8
    unasked = [layer for layer in report.skipped if not layer.by_request and "shared" not in layer.reason]
    assert [layer.name for layer in unasked] == [name for name in linears if name.endswith("mlp.gate")], str(report)
    losses = []
    for _ in range(NUM_STEPS):
        loss = model.loss(batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert all(torch.isfinite(torch.tensor(losses)))
    assert losses[-1] < LEARNED * losses[0]
    assert set(model.eval().loss(batch).metrics)
    _check_export(architecture, trained, optimizer, tmp_path / "exported")


def _check_export(architecture: str, trained: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """transformers loads what is exported, without a missing or unknown weight, and computes what a plain network computes."""
    export(trained, optimizer, folder, format="fp32")
    task = TASKS[architecture]
    auto_class = getattr(transformers(), AUTO_CLASSES[task])
    loaded, info = auto_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    plain = build_model(HuggingFaceSpec(architecture=architecture, config=CONFIGS[architecture]), seed=1).eval()
    plain.load_state_dict(plain_state_dict(trained))
    inputs = batch_of(architecture)["images" if task == "image_class" else "tokens"]
    with torch.no_grad():
        torch.testing.assert_close(wrap(loaded.eval(), task)(inputs), plain(inputs), rtol=1e-4, atol=1e-5)


NOT_CONVERTED = re.compile(r"embed_tokens|lm_head|norm|bias|sinks|mlp\.gate\.weight|mlp\.router\.weight")
"""Parameters of mixtures that no level converts: of embeddings, heads, norms, attention's sinks and routers; biases."""


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"])
def test_a_mixture_is_converted_but_for_its_ends_and_routers(architecture: str, tmp_path: Path) -> None:
    """It computes what transformers does, is trained, and an export in FP8 says of each tensor what it is."""
    torch.set_num_threads(1)
    spec, batch = HuggingFaceSpec(architecture=architecture, config=CONFIGS[architecture]), batch_of(architecture)
    plain, model = build_model(spec, seed=0), build_model(spec, seed=0)
    expected = plain(batch["tokens"])
    unstack_experts(model, PrecisionSpec(level="O3"))
    torch.testing.assert_close(model(batch["tokens"]), expected, rtol=1e-4, atol=1e-5)
    trained, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), "O3")
    report = trained.octet_report
    assert isinstance(report, ConversionReport)
    left = {name: parameter.numel() for name, parameter in trained.named_parameters() if not is_float8_weight(parameter)}
    assert not [name for name in left if not NOT_CONVERTED.search(name)]
    num_parameters = sum(parameter.numel() for parameter in plain.parameters())
    assert report.num_converted_parameters == num_parameters - sum(left.values()) > 0.7 * num_parameters
    assert not [event for event in conversion_events(report, trained) if event.type == "layers.not_linear"]
    model.loss(batch).loss.backward()
    assert optimizer is not None
    optimizer.step()
    folder = export(trained, optimizer, tmp_path / "exported", format="fp8")
    check_claims(folder)
    loaded, info = transformers().AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    again, _ = load_pretrained(folder, "O3")
    values = plain_state_dict(again)
    codes = {
        name: layer.encoded.codes for name, layer in trained.named_modules() if getattr(layer, "encoded", None) is not None
    }
    assert len(codes) == len(report.converted)
    if architecture != "gpt_oss":  # its files hold experts in stacks, which are written in bf16
        assert all(
            torch.equal(again.get_submodule(name.removeprefix("network.")).encoded.codes, own) for name, own in codes.items()
        )
    with torch.no_grad():
        logits, theirs = again.eval()(batch["tokens"]).logits, loaded.eval()(batch["tokens"]).logits.float()
    assert (logits - theirs).norm() < 0.1 * logits.norm()
    assert values.keys() == {name.removeprefix("network.") for name in plain_state_dict(trained)}


def check_claims(folder: Path) -> None:
    """Each matrix of a file is codes with a scale, an embedding, or named by `ignore` itself or by what holds it."""
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or name.endswith("_scale") or "embed_tokens" in name:
            continue
        is_ignored = any(name == module or name.startswith(f"{module}.") for module in ignored)
        assert (tensor.dtype == torch.float8_e4m3fn and f"{name}_scale" in tensors) != is_ignored, name


class OwnExperts(nn.Module):
    """Experts that are none of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.weight = nn.Linear(32, 32), nn.Parameter(torch.zeros(3, 32, 64))


def test_experts_of_classes_of_their_own_are_left_and_counted() -> None:
    """A job's event names what no level converts."""
    trained, _ = initialize(nn.Sequential(nn.Linear(32, 32), OwnExperts()), None, "O2")
    report = trained.octet_report
    assert isinstance(report, ConversionReport)
    assert report.converted == ("0", "1.router")
    [event] = [event for event in conversion_events(report, trained) if event.type == "layers.not_linear"]
    assert event.data == {"parameters": 3 * 32 * 64}
    assert "1.weight" in event.message


@pytest.mark.parametrize("architecture", [name for name in CONFIGS if TASKS[name] == "next_token"])
def test_a_causal_model_does_not_see_the_tokens_that_it_predicts(architecture: str) -> None:
    model = build_model(HuggingFaceSpec(architecture=architecture, config=CONFIGS[architecture]), seed=0).eval()
    tokens = batch_of(architecture)["tokens"][:2]
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    with torch.no_grad():
        first, second = model(tokens), model(changed)
    torch.testing.assert_close(first[:, :-1], second[:, :-1])
    assert not torch.allclose(first[:, -1], second[:, -1])


def test_every_configuration_says_what_its_data_must_fit() -> None:
    for architecture, config in CONFIGS.items():
        takes = HuggingFaceSpec(architecture=architecture, config=config).sizes.takes
        if isinstance(takes, TokenInput):
            assert takes.vocab_size == VOCABULARY
            assert takes.max_sequence_length in (None, 64)
        else:
            assert (takes.image_size, takes.num_classes) == (16, 4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # transformers' DeBERTa, when it is imported
@pytest.mark.parametrize(
    "architecture",
    [
        name if name in (*MARKS, "opt") else pytest.param(name, marks=pytest.mark.matrix)
        for name in CONFIGS
        if TASKS[name] != "image_class" and name not in WITH_OTHER_LOGITS
    ],
)
def test_its_fused_loss_is_the_unfused_one(architecture: str) -> None:
    torch.set_num_threads(1)
    found = []
    for is_fused in (False, True):
        model = build_model(HuggingFaceSpec(architecture=architecture, config=CONFIGS[architecture]), seed=0)
        initialize(model, opt_level="bf16-amp")
        if is_fused:
            fuse_loss(model)
        torch.manual_seed(0)
        loss = model.loss(batch_of(architecture)).loss
        loss.backward()
        gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        found.append((loss.detach(), torch.cat(gradients)))
    (loss, gradient), (fused_loss, fused_gradient) = found
    torch.testing.assert_close(fused_loss, loss, rtol=1e-6, atol=0.0)
    assert (fused_gradient - gradient).norm() < 2.0**-8 * gradient.norm()


@pytest.mark.parametrize("architecture", WITH_OTHER_LOGITS)
def test_a_network_that_computes_with_its_logits_is_refused_a_fused_loss(architecture: str) -> None:
    config = CONFIGS.get(architecture, GROUPED)
    model = build_model(HuggingFaceSpec(architecture=architecture, config=config), seed=0)
    initialize(model, opt_level="O2")
    fuse_loss(model)
    expected = rf"training.fused_loss: the network computes with its logits \({WITH_OTHER_LOGITS[architecture]}\)"
    with pytest.raises(InvalidConfig, match=expected):
        model.loss(batch_of(architecture))
    assert torch.isfinite(model.eval().loss(batch_of(architecture)).loss)


BARE: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen3": CONFIGS["qwen3"] | {"tie_word_embeddings": True},
    "gpt2": CONFIGS["gpt2"],
    "phi": GROUPED,
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64, "vocab_size": VOCABULARY}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "roberta": CONFIGS["roberta"],
}
"""Networks without our wrapper: an untied head, tied ones, heads with a bias (phi, gptj; roberta's is tied, too)."""


def bare_network(architecture: str, config: dict[str, Any]) -> nn.Module:
    """Return transformers' own network in training, converted, as people have it in their loops."""
    loaded = transformers()
    torch.manual_seed(0)
    auto_class = getattr(loaded, AUTO_CLASSES[TASKS[architecture]])
    network: nn.Module = auto_class.from_config(loaded.AutoConfig.for_model(architecture, **config)).train()
    return initialize(network, opt_level="bf16-amp")[0]


def labelled(**options: Any) -> dict[str, Any]:
    """Return what a network of transformers computes a loss of; a few targets do not count."""
    tokens = torch.randint(3, 256, (4, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.index_fill(1, torch.tensor([2, 5, 6]), -100), **options}


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 40}], ids=["mean", "sum"])
@pytest.mark.parametrize("architecture", BARE)
def test_a_bare_networks_fused_loss_is_the_unfused_one(architecture: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if options and TASKS[architecture] != "next_token":
        options = {}
    found = []
    for is_fused in (False, True):
        network = bare_network(architecture, BARE[architecture])
        if is_fused:
            fuse_loss(network)
        output = network(**labelled(**options))
        output.loss.backward()
        gradients = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
        with torch.no_grad():
            found.append((output, gradients, network.eval()(**labelled()).logits))
    (plain, gradients, logits), (fused, fused_gradients, fused_logits) = found
    assert isinstance(fused.logits, DeferredLogits)
    assert torch.equal(fused_logits, logits)
    torch.testing.assert_close(fused.loss.detach(), plain.loss.detach(), rtol=1e-6, atol=0.0)
    assert fused_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (fused_gradients[name] - gradient).norm() <= 2.0**-7 * gradient.norm() + 1e-8, name


def test_a_persons_own_loss_of_a_fused_network_is_the_unfused_one() -> None:
    """Around a module of theirs, with shifted logits, as most loops have it."""
    losses = []
    for is_fused in (False, True):
        network = bare_network("llama", GROUPED)
        if is_fused:
            fuse_loss(nn.Sequential(network))
        batch = labelled()
        logits = network(batch["input_ids"]).logits[..., :-1, :].contiguous()
        targets = batch["labels"][..., 1:].contiguous()
        losses.append(nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), targets.view(-1)).detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("architecture", WITH_OTHER_LOGITS)
def test_a_bare_network_that_computes_with_its_logits_is_refused(architecture: str) -> None:
    network = bare_network(architecture, CONFIGS.get(architecture, GROUPED))
    fuse_loss(network)
    with pytest.raises(
        InvalidConfig, match=rf"\({WITH_OTHER_LOGITS[architecture]}\).*final_logit_softcapping.*leave out fuse_loss"
    ):
        network(**labelled())


@pytest.mark.parametrize(
    ("compute", "used"),
    [
        (lambda logits, targets: functional.cross_entropy(logits, targets, label_smoothing=0.1), "label_smoothing"),
        (lambda logits, targets: functional.cross_entropy(logits, targets, reduction="none"), "reduction"),
        (lambda logits, targets: functional.cross_entropy(logits, targets, weight=torch.ones(VOCABULARY)), "weight"),
        (lambda logits, _: functional.cross_entropy(logits, torch.rand(64, VOCABULARY)), "shares of several entries"),
        (lambda logits, _: functional.log_softmax(logits, -1), "log_softmax"),
        (lambda logits, _: torch.tanh(logits), "tanh"),
        (lambda logits, _: logits.bfloat16(), "bfloat16"),
        (lambda logits, _: logits.to(torch.bfloat16), "to torch.bfloat16"),
        (lambda logits, _: logits[:, :7], "a part of them"),
        (lambda logits, _: logits.view(-1), "view"),
        (lambda logits, _: torch.ones(64, 1) * logits, "mul"),
    ],
)
def test_any_other_use_of_fused_logits_is_refused_by_name(compute: Any, used: str) -> None:
    network = bare_network("llama", GROUPED)
    fuse_loss(network)
    batch = labelled()
    logits = network(batch["input_ids"]).logits.view(-1, VOCABULARY)
    with pytest.raises(InvalidConfig, match=used):
        compute(logits, batch["labels"].view(-1))
