"""Documents packed in one sequence: logits and losses are those of the documents alone, for ours and transformers' models."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octet.api_schemas.models import GPTSpec, LlamaSpec
from octet.api_schemas.models.architectures import KEEPS_DOCUMENTS_APART, TASKS
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.worker.models import TrainedModel, build_model, context
from octet.worker.models.cross_entropy import IGNORED
from octet.worker.models.documents import document_numbers, document_spans, document_starts, positions_in_documents
from octet.worker.models.transformers_attention import NAME
from octet.worker.prepare.blocks import checkpoint_blocks, compile_blocks
from tests.worker.models.test_architectures import CONFIGS, GROUPED, UNPADDED, VOCABULARY

LENGTHS = ((5, 1, 18), (10, 10, 4), (24,))
OURS = {"num_layers": 2, "num_heads": 4, "hidden_size": 64, "vocab_size": VOCABULARY, "max_sequence_length": 24}
IN_EVERY_RUN = ("llama", "gpt2")
TOLERANCE = 1e-5
"""fp32 sums in another order, relative to the largest logit. Models that mix documents are off by 1e-2 or more."""


def specs() -> list[Any]:
    ours = [GPTSpec(**OURS), LlamaSpec(**OURS, num_key_value_heads=2, intermediate_size=96)]
    cases = [pytest.param(spec, id=f"ours-{spec.family}") for spec in ours]
    for name in sorted(KEEPS_DOCUMENTS_APART):
        spec = HuggingFaceSpec(architecture=name, config=CONFIGS.get(name, GROUPED | UNPADDED))
        cases.append(pytest.param(spec, id=name, marks=() if name in IN_EVERY_RUN else pytest.mark.matrix))
    return cases


@pytest.mark.parametrize("spec", specs())
def test_packed_documents_are_computed_as_if_alone(spec: Any) -> None:
    torch.set_num_threads(1)
    model = build_model(spec, seed=0).eval()
    tokens_BT = torch.randint(3, 256, (len(LENGTHS), 24), generator=torch.Generator().manual_seed(1))
    documents_BD = document_starts(
        torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    )
    targets_BT = tokens_BT.roll(-1, 1).masked_fill(tokens_BT % 3 == 0, IGNORED)
    num_targets_B = (targets_BT != IGNORED).sum(1)
    with torch.no_grad():
        packed_BTV = model(tokens_BT, documents_BD)
        packed = model.loss(
            {"tokens": tokens_BT, "targets": targets_BT, "documents": documents_BD, "num_targets": num_targets_B}
        )
        loss_sum = torch.zeros(())
        for row, lengths in enumerate(LENGTHS):
            for places in torch.arange(24).split(list(lengths)):
                alone = _alone(model, tokens_BT[row : row + 1, places])
                error = (packed_BTV[row : row + 1, places] - alone).abs().max() / alone.abs().max()
                assert error < TOLERANCE
                loss_sum += torch.nn.functional.cross_entropy(
                    alone[0].float(), targets_BT[row, places], ignore_index=IGNORED, reduction="sum"
                )
    assert packed.num_targets == int(num_targets_B.sum())
    torch.testing.assert_close(packed.loss, loss_sum / packed.num_targets, rtol=1e-5, atol=1e-6)


def _alone(model: TrainedModel, tokens_1T: Tensor) -> Tensor:
    logits: Tensor = model(tokens_1T)
    return logits


@pytest.mark.parametrize("spec", specs()[:2])
@pytest.mark.parametrize("option", ["none", "selective", "full", "compiled"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
def test_gradients_are_those_of_a_dense_mask(spec: Any, option: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens_BT = torch.randint(3, 256, (2, 25), generator=torch.Generator().manual_seed(1))
    documents_BD = torch.tensor([[0, 5, 6, 24], [0, 20, 24, 24]], dtype=torch.int32)
    numbers_BT = document_numbers(documents_BD, 24)
    mask_B1TT = (numbers_BT[:, :, None] == numbers_BT[:, None, :]).tril()[:, None]

    def dense(query: Tensor, key: Tensor, value: Tensor, *_starts: Tensor) -> Tensor:
        key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1) for heads in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=mask_B1TT)

    found = []
    for is_dense in (False, True):
        model = build_model(spec, seed=0)
        if is_dense:
            monkeypatch.setattr(context, "document_attention", dense)
        elif option == "compiled":
            torch.compiler.reset()
            compile_blocks(model, backend="aot_eager")
        else:
            checkpoint_blocks(model, option)
        loss = model.loss({"tokens": tokens_BT[:, :-1], "targets": tokens_BT[:, 1:], "documents": documents_BD}).loss
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for own, of_dense in zip(*found, strict=True):
        assert torch.equal(own, of_dense)


@pytest.mark.system
@pytest.mark.parametrize("spec", specs())
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
def test_compiled_blocks_with_documents_are_one_graph(spec: Any) -> None:
    torch.set_num_threads(1)
    tokens_BT = torch.randint(3, 256, (2, 25), generator=torch.Generator().manual_seed(1))
    documents_BD = torch.tensor([[0, 5, 6, 24], [0, 20, 24, 24]], dtype=torch.int32)
    found = []
    for is_compiled in (False, True):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        model = build_model(spec, seed=0).eval()  # some drop values in training
        if is_compiled:
            compile_blocks(model, backend="aot_eager")
        loss = model.loss({"tokens": tokens_BT[:, :-1], "targets": tokens_BT[:, 1:], "documents": documents_BD}).loss
        loss.backward()
        found.append([loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)])
    assert not torch._dynamo.utils.counters["graph_break"]
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-6)


SLIDING: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma2": {},
    "gemma3_text": {},
    "cohere2": {},
    "olmo3": {},
    "mixtral": {},
    "phi3": {},
    "starcoder2": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 0},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 0},
}
"""Architectures whose layers see a window of the last tokens, and what else their configuration needs for it."""


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "mistral" else pytest.mark.matrix) for name in SLIDING]
)
def test_windows_and_gradients_are_those_of_transformers(name: str, is_packed: bool) -> None:
    """Its own attention finds documents in positions, and makes a mask of documents and windows."""
    config = CONFIGS.get(name, GROUPED | UNPADDED) | {"sliding_window": 5} | SLIDING[name]
    tokens_BT = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    documents_BD = torch.tensor([[0, 2, 14], [0, 24, 24]], dtype=torch.int32) if is_packed else None
    options = {"position_ids": positions_in_documents(documents_BD, 24)} if documents_BD is not None else {}
    found = []
    for is_ours in (True, False):
        model: Any = build_model(HuggingFaceSpec(architecture=name, config=config), seed=0)
        if is_ours:
            logits_BTV = model(tokens_BT, documents_BD)
        else:
            model.network.set_attn_implementation("sdpa")
            logits_BTV = model.network(input_ids=tokens_BT, use_cache=False, **options).logits
        (logits_BTV**2).mean().backward()
        found.append([logits_BTV.detach(), *(parameter.grad for parameter in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_dropped_values_are_those_of_transformers() -> None:
    """The op drops nothing: a mask is made then, and the same numbers are drawn."""
    model: Any = build_model(HuggingFaceSpec(architecture="gpt2", config=CONFIGS["gpt2"] | {"attn_pdrop": 0.5}), seed=0)
    tokens_BT = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    documents_BD = torch.tensor([[0, 2, 14], [0, 24, 24]], dtype=torch.int32)
    torch.manual_seed(3)
    ours = model(tokens_BT, documents_BD)
    model.network.set_attn_implementation("sdpa")
    torch.manual_seed(3)
    theirs = model.network(input_ids=tokens_BT, position_ids=positions_in_documents(documents_BD, 24), use_cache=False).logits
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", IN_EVERY_RUN)
def test_no_mask_is_made_and_no_position_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("transformers makes a mask, or looks for documents on the device")

    for function in ("find_packed_sequence_indices", "sdpa_mask", "eager_mask"):
        monkeypatch.setattr(masking_utils, function, refuse)
    for attention in (NAME, "sdpa"):
        monkeypatch.setitem(masking_utils.AttentionMaskInterface._global_mapping, attention, refuse)
    model: Any = build_model(HuggingFaceSpec(architecture=name, config=CONFIGS[name]), seed=0)
    tokens_BT = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    for documents_BD in (None, torch.tensor([[0, 2, 14], [0, 24, 24]], dtype=torch.int32)):
        assert model(tokens_BT, documents_BD).isfinite().all()
    assert "attn_implementation" not in model.network.config.to_json_string()
    model.network.set_attn_implementation("sdpa")
    with pytest.raises(AssertionError, match="transformers makes a mask"):
        model(tokens_BT)


MASKS: dict[str, Any] = {
    "padded at the left": lambda: {"attention_mask": torch.arange(24).ge(torch.tensor([[5], [0]])).long()},
    "padded at the right": lambda: {"attention_mask": torch.arange(24).lt(torch.tensor([[24], [9]]))},
    "elements": lambda: {"attention_mask": torch.ones(24, 24, dtype=torch.bool).tril().triu(-7).expand(2, 1, 24, 24)},
    "packed positions": lambda: {"position_ids": torch.arange(24).remainder(10).expand(2, 24)},
    "none": dict,
}
"""Arguments that people give to the network within a model."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each == "mistral" else pytest.mark.matrix) for each in sorted(KEEPS_DOCUMENTS_APART)],
)
def test_the_network_alone_takes_the_masks_of_transformers(name: str) -> None:
    """Padding is not attended to, and layers with a window have masks of their own."""
    config = CONFIGS.get(name, GROUPED | UNPADDED) | ({"sliding_window": 5} | SLIDING[name] if name in SLIDING else {})
    tokens_BT = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    network: Any = build_model(HuggingFaceSpec(architecture=name, config=config), seed=0).network
    for what, options in MASKS.items():
        found = []
        for attention in (NAME, "sdpa"):
            network.set_attn_implementation(attention)
            network.zero_grad()
            torch.manual_seed(3)  # some drop values or disturb routers
            logits_BTV = network(input_ids=tokens_BT, use_cache=False, **options()).logits
            logits_BTV.square().mean().backward()
            found.append([logits_BTV.detach(), *(one.grad for one in network.parameters() if one.grad is not None)])
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs), what


def test_the_network_alone_generates_after_padding() -> None:
    """A padded prompt has the logits of the prompt alone, and its continuation reads the cache."""
    network: Any = build_model(HuggingFaceSpec(architecture="llama", config=CONFIGS["llama"]), seed=0).network.eval()
    tokens_BT = torch.randint(3, 256, (1, 9), generator=torch.Generator().manual_seed(1))
    padded_BT, mask_BT = torch.nn.functional.pad(tokens_BT, (3, 0)), torch.nn.functional.pad(torch.ones_like(tokens_BT), (3, 0))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "output_logits": True}
    alone = network.generate(tokens_BT, return_dict_in_generate=True, **options).logits
    padded = network.generate(padded_BT, attention_mask=mask_BT, return_dict_in_generate=True, **options).logits
    assert len(alone) == len(padded) == 6
    for one, other in zip(padded, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_positions_and_masks_end_at_borders() -> None:
    documents_BD = document_starts(torch.tensor([[0, 0, 1, 2, 2, 2], [4, 4, 4, 4, 4, 4]]), num_starts=4)
    assert documents_BD.tolist() == [[0, 2, 3, 6], [0, 6, 6, 6]]
    assert positions_in_documents(documents_BD, 6).tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    (of_all,) = document_spans(documents_BD, [(0, 6)])
    assert of_all.query_starts.tolist() == of_all.key_starts.tolist() == [0, 2, 3, 6, 6, 12, 12, 12, 12]
    (of_part,) = document_spans(documents_BD, [(2, 4)])
    assert of_part.query_starts.tolist() == [0, 0, 1, 2, 2, 4, 4, 4, 4]
    assert of_part.key_starts.tolist() == [0, 2, 3, 4, 4, 8, 8, 8, 8]
    with pytest.raises(ValueError, match=r"documents is torch.int64 \(1, 6\); allowed: torch.int32"):
        positions_in_documents(torch.tensor([[0, 0, 1, 2, 2, 2]]), 6)


def test_only_decoders_keep_documents_apart() -> None:
    assert {TASKS[name] for name in KEEPS_DOCUMENTS_APART} == {"next_token"}
