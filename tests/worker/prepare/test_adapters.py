"""Adapters of a frozen model: gradients, bytes, resume, and what peft and transformers load."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from octet.api_schemas import EventReport, JobSpec
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.api_schemas.models.llama import LlamaSpec
from octet.api_schemas.precision import PrecisionSpec
from octet.api_schemas.training import AdapterSpec
from octet.worker.common.errors import Cancelled, InvalidConfig
from octet.worker.metrics.memory import memory_report
from octet.worker.models import TrainedModel, build_model
from octet.worker.prepare.adapters import NAME, Adapter, adapters_of, add_adapters, attach_adapters
from octet.worker.prepare.blocks import compile_blocks
from octet.worker.prepare.initialize import prepare
from octet.worker.pretrained.__main__ import main as export
from tests.kit.chat import VOCAB_SIZE, save_tokenizer, write_chats
from tests.kit.training import Recorder, train, with_training

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
}
ADAPTER = {"rank": 8, "alpha": 16, "targets": ["q_proj", "*.mlp.*"]}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_tokenizer(folder)
    build_model(HuggingFaceSpec(architecture="llama", config=CONFIG), seed=3).network.save_pretrained(folder)
    return folder


@pytest.fixture
def document(base: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "name": "adapted",
        "model": {"path": str(base)},
        "adapter": ADAPTER,
        "precision": {"level": "O3"},
        "data": {"source": "jsonl", "path": str(write_chats(tmp_path / "chats.jsonl")), "packing": True},
        "training": {"steps": 6, "global_batch_size": 4, "sequence_length": 64, "optimizer": {"learning_rate": 2e-2}},
    }


def adapted(level: str, config: dict[str, Any], dtype: str = "fp32") -> TrainedModel:
    model = build_model(HuggingFaceSpec(architecture="llama", config=config), seed=3)
    spec = AdapterSpec(rank=4, alpha=6.0, targets=("*_proj",), dtype=dtype)  # type: ignore[arg-type]
    precision = PrecisionSpec(level=level)  # type: ignore[arg-type]
    add_adapters(model, spec, precision, 0, CPU)
    prepare(model, None, precision)
    attach_adapters(model)
    return model


def test_gradients_are_those_of_dense_sums() -> None:
    """W + (alpha / rank) · b · a as one dense matrix in each layer's place gives the same loss and the same gradients."""
    torch.set_num_threads(1)
    model = adapted("fp32", CONFIG)
    generator = torch.Generator().manual_seed(1)
    adapters = {name: adapter for name, adapter in adapters_of(model).items() if isinstance(adapter, Adapter)}
    assert len(adapters) == 14
    for adapter in adapters.values():
        adapter.b.data.normal_(0, 0.1, generator=generator)
    tokens_BT = torch.randint(VOCAB_SIZE, (2, 16), generator=generator)
    batch = {"tokens": tokens_BT, "targets": tokens_BT.roll(-1, 1)}
    loss = model.loss(batch).loss
    loss.backward()

    dense = build_model(HuggingFaceSpec(architecture="llama", config=CONFIG), seed=3)
    matrices = {name: (a.a.detach().requires_grad_(), a.b.detach().requires_grad_()) for name, a in adapters.items()}
    sums = {f"{name}.weight": dense.get_parameter(f"{name}.weight") + 1.5 * b @ a for name, (a, b) in matrices.items()}
    logits: Tensor = functional_call(dense, sums, (tokens_BT,))
    expected = functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name, adapter in adapters.items():
        for own, theirs in zip((adapter.a, adapter.b), matrices[name], strict=True):
            torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    frozen = [name for name, parameter in model.named_parameters() if not name.startswith(NAME) and parameter.grad is not None]
    assert frozen == []


def test_a_frozen_base_takes_one_byte_for_a_converted_weight_and_two_for_the_rest() -> None:
    config = CONFIG | {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 256}
    model = adapted("O3", config, dtype="bf16")
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    report = memory_report(model)
    held = report["weights"] - 2 * trained + report["scales"] + report["master_weights"]
    num_frozen = sum(parameter.numel() for parameter in frozen)
    assert held / num_frozen < 1.1
    sizes = LlamaSpec(preset="llama-8b").sizes
    assert (sizes.num_block_weights + 2 * (sizes.num_parameters - sizes.num_block_weights)) / sizes.num_parameters < 1.15


@pytest.mark.system
def test_it_learns_resumes_bit_for_bit_and_saves_no_frozen_weight(tmp_path: Path, document: dict[str, Any]) -> None:
    document = with_training(document, "O3", steps=6, checkpoint_every=3)
    whole, summary = train(document, tmp_path / "whole")
    assert whole.losses()[-1] < 0.9 * whole.losses()[0]
    assert summary.memory_bytes["master_weights"] == 0

    stopping = Recorder(stop_after_step=4, stop=Cancelled)
    with pytest.raises(Cancelled):
        train(document, tmp_path / "parts", recorder=stopping)
    resumed, resumed_summary = train(document, tmp_path / "parts", checkpoints=stopping.checkpoints())
    assert resumed.losses() == whole.losses()[3:]
    assert resumed_summary.evaluation_loss == summary.evaluation_loss
    paths = [
        tmp_path / name / "checkpoints" / whole.checkpoints()[0].name / "tensors.safetensors" for name in ("whole", "parts")
    ]
    with safe_open(paths[0], "pt") as one, safe_open(paths[1], "pt") as other:
        names = list(one.keys())
        assert not [name for name in names if name.startswith("/model/network") and name.endswith(("weight", "weight_codes"))]
        assert sum(name.startswith(f"/model/{NAME}") for name in names) == 2 * 8
        for name in names:
            assert torch.equal(one.get_tensor(name).view(torch.uint8), other.get_tensor(name).view(torch.uint8))


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
def test_peft_loads_adapters_of_conv1d_layers(tmp_path: Path, document: dict[str, Any]) -> None:
    """GPT-2 holds its weights as (K, N). The adapter's config says so for peft, and merged weights keep that layout."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    save_tokenizer(folder)
    config = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB_SIZE}
    config |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    build_model(HuggingFaceSpec(architecture="gpt2", config=config), seed=3).network.save_pretrained(folder)
    document["model"], document["adapter"] = {"path": str(folder)}, ADAPTER | {"targets": ["c_attn", "*.mlp.c_fc"]}
    document["data"]["packing"] = False
    test_peft_loads_what_is_exported_and_computes_the_same(folder, tmp_path, document)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["fan_in_fan_out"] is True


@pytest.mark.filterwarnings("ignore")
def test_peft_loads_what_is_exported_and_computes_the_same(base: Path, tmp_path: Path, document: dict[str, Any]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    document = with_training(document, "fp32", steps=3)
    recorder, _ = train(document, tmp_path / "job")
    checkpoint = str(tmp_path / "job" / "checkpoints" / recorder.checkpoints()[0].name)
    assert export([checkpoint, "--out", str(tmp_path / "adapter")]) == 0
    assert export([checkpoint, "--merge", "--format", "fp32", "--out", str(tmp_path / "merged")]) == 0
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)

    def logits(model: nn.Module) -> Tensor:
        with torch.no_grad():
            found: Tensor = model.eval()(torch.arange(48)[None]).logits
        return found

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(plain)
    by_peft = logits(PeftModel.from_pretrained(plain, tmp_path / "adapter").float())
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(logits(merged), by_peft, rtol=1e-4, atol=1e-5)
    assert float((by_peft - before).abs().max()) > 0.05
    ours = _loaded(document, checkpoint)
    torch.testing.assert_close(ours(torch.arange(48)[None]), by_peft, rtol=1e-4, atol=1e-5)


def _loaded(document: dict[str, Any], checkpoint: str) -> TrainedModel:
    """The model of a checkpoint as the trainer has it when it resumes, to evaluate."""
    from octet.worker.checkpoint import load_folder
    from octet.worker.prepare.adapters import with_frozen
    from octet.worker.pretrained.start import start_model

    spec = JobSpec.model_validate(document)
    model, source = start_model(spec.model, 0)
    add_adapters(model, spec.adapter, spec.precision, 0, CPU)
    prepare(model, None, spec.precision, source=source)
    attach_adapters(model)
    model.load_state_dict(with_frozen(model, load_folder(Path(checkpoint))["model"]))
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": {"preset": "gpt-tiny"}}, "the folder of a saved model"),
        ({"parallelism": {"zero_stage": 1}}, "too small to divide"),
        ({"adapter": {"rank": 0}}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_combined_is_refused(document: dict[str, Any], change: dict[str, Any], says: str) -> None:
    document["data"] = {"source": "jsonl", "path": "/data.jsonl", "tokenizer": "/tokenizer"}
    with pytest.raises(ValidationError, match=says):
        JobSpec.model_validate(document | change)


def test_a_target_without_a_layer_is_named(tmp_path: Path, document: dict[str, Any]) -> None:
    document["adapter"] = {"targets": ["query"]}
    with pytest.raises(InvalidConfig, match=r"'query' matches no linear layer .* q_proj"):
        train(document, tmp_path / "job")


def test_merging_and_fp8_are_refused_where_they_say_nothing(tmp_path: Path, document: dict[str, Any], capsys: Any) -> None:
    recorder, _ = train(with_training(document, "O3", steps=1), tmp_path / "job")
    checkpoint = str(tmp_path / "job" / "checkpoints" / recorder.checkpoints()[0].name)
    assert export([checkpoint, "--format", "fp8", "--out", str(tmp_path / "out")]) == 2
    assert "allowed: bf16 or fp32" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.system
def test_options_that_save_memory_train_adapters(tmp_path: Path, document: dict[str, Any]) -> None:
    exact = document["training"] | {"gradient_clip": None}
    found = []
    for index, options in enumerate(
        (
            {},
            {"gradient_release": True, "offload_optimizer": True},
            {"activation_checkpointing": "selective"},
            {"activation_checkpointing": "full"},
            {"fused_loss": True, "saved_activations": "fp8"},
        )
    ):
        recorder, _ = train(document | {"training": exact | options}, tmp_path / str(index))
        found.append(recorder.losses())
    *same, rounded = found
    assert all(losses == same[0] for losses in same)
    assert rounded == pytest.approx(same[0], rel=2e-2)
    assert rounded != same[0]


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.parametrize(
    ("level", "options"),
    [
        pytest.param(level, {name: value}, marks=() if (level, value) == ("O3-split", "fp8") else pytest.mark.matrix)
        for level in LEVELS
        for name, value in (
            *(("activation_checkpointing", kind) for kind in ("none", "selective", "full")),
            ("saved_activations", "fp8"),
        )
    ],
)
def test_compiled_blocks_train_adapters_as_eager_ones_do(
    tmp_path: Path, document: dict[str, Any], level: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen weights of codes are inputs of a block's graph, each of several tensors. Documents are packed."""
    monkeypatch.setattr("octet.worker.prepare.blocks.compile_blocks", lambda model: compile_blocks(model, backend="aot_eager"))
    found = []
    for compiling in ("on", "off"):
        torch.compiler.reset()
        recorder, _ = train(with_training(document, level, compile=compiling, **options), tmp_path / compiling)
        found.append(recorder.losses())
        events = [event.type for event in recorder.of(EventReport) if event.type.startswith("training.")]
        assert events == (["training.compiled"] if compiling == "on" else [])
    compiled, eager = found
    assert compiled == eager
