"""Converted models on an accelerator: they enter autocast by themselves, so that no op meets two dtypes."""

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from torch import nn

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize
from octet.worker.common.wrap import unwrap
from octet.worker.fp8.accelerator import cpu_as_accelerator
from tests.kit.accelerator import HALVES, cuda_dtypes
from tests.kit.families import FAMILIES, TOKENS, batch_of, fit_loss_scale

TRAINED_LEVELS = [name for name, level in LEVELS.items() if level.gemm != "fp32"]
IN_EVERY_RUN = {"O2": ("gpt", "llama", "transformers-llama", "roberta", "vit", "swin"), "ao": ("swin",)}
"""The families that meet a level in `make test`; the others do in `make test-matrix`."""


def families_and_levels() -> list[Any]:
    return [
        pytest.param(family, level, marks=() if family in IN_EVERY_RUN.get(level, ()) else pytest.mark.matrix)
        for family in FAMILIES
        for level in TRAINED_LEVELS
    ]


def gpt(level: str = "O2") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = FAMILIES["gpt"]()
    return initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level)


@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.parametrize(("family", "level"), families_and_levels())
def test_a_step_mixes_no_dtypes(family: str, level: str) -> None:
    model = FAMILIES[family]()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
    fit_loss_scale(model)
    losses = []
    with cuda_dtypes() as seen:
        for _ in range(2):
            loss = model.loss(batch_of(family)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    half = torch.float16 if LEVELS[level].gemm == "fp16" else torch.bfloat16
    assert seen.attention_dtypes <= {half}
    assert seen.attention_dtypes or family == "swin"  # whose attention is two products of its own
    assert losses[1] < losses[0]


@pytest.mark.parametrize("level", ["bf16-amp", "te", "ao", "O2"])
def test_inference_mode_computes_the_same(level: str) -> None:
    model, _ = initialize(FAMILIES["gpt"](), opt_level=level)
    model.eval()
    with cpu_as_accelerator():
        with torch.no_grad():
            expected = model(TOKENS)
        with torch.inference_mode():
            assert torch.equal(model(TOKENS), expected)
    assert expected.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["swin", "roberta", "transformers-llama"])
def test_without_autocast_cuda_would_refuse_it(family: str) -> None:
    """Prove that the test above can fail: these families raise an error if no module enters autocast."""
    model, _ = initialize(FAMILIES[family](), opt_level="O2")
    unwrap(model)
    with cuda_dtypes(), pytest.raises(RuntimeError, match=r"CUDA refuses|same dtype|Expected"):
        model.loss(batch_of(family))


def test_a_part_enters_autocast_when_it_is_called_by_itself() -> None:
    model, _ = gpt()
    with cuda_dtypes():
        hidden = model.blocks[0](torch.randn(2, 16, 32))
        assert model.blocks[0].mlp.forward(hidden).dtype == torch.bfloat16
        assert model.forward(TOKENS).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_the_autocast_of_the_user_wins() -> None:
    seen = []
    model, _ = gpt()
    model.final_norm.register_forward_pre_hook(lambda *_call: seen.append(torch.get_autocast_dtype("cpu")))
    with cuda_dtypes(), torch.autocast("cpu", dtype=torch.float16):
        model(TOKENS)
    assert seen == [torch.float16]


def test_on_a_cpu_nothing_enters_autocast() -> None:
    seen = []
    model, _ = gpt()
    model.final_norm.register_forward_pre_hook(lambda *_call: seen.append(torch.is_autocast_enabled("cpu")))
    assert model(TOKENS).dtype == torch.float32
    assert seen == [False]


def test_copies_pickles_and_state_dicts_carry_it() -> None:
    model, _ = gpt()
    plain_names = set(FAMILIES["gpt"]().state_dict())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    restored = torch.load(buffer, weights_only=False)
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    assert plain_names == set(model.state_dict())
    with cuda_dtypes():
        expected = model(TOKENS)
        for other in (twin, restored):
            assert other.forward.module is other
            assert torch.equal(other(TOKENS), expected)
            assert other(TOKENS).dtype in HALVES


def test_the_signature_stays_what_transformers_reads() -> None:
    network = initialize(FAMILIES["transformers-llama"](), opt_level="O2")[0].network
    assert inspect.signature(network.forward) == inspect.signature(type(network).forward.__get__(network))


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
def test_it_compiles_without_a_graph_break() -> None:
    model, _ = gpt()
    eager = copy.deepcopy(model)
    with cpu_as_accelerator():
        expected = eager(TOKENS)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(TOKENS)
        assert torch.equal(compiled, expected)
        compiled.float().sum().backward()
        expected.float().sum().backward()
    for parameter, eager_parameter in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(parameter.grad + 0, eager_parameter.grad + 0)


def test_generate_runs_under_it() -> None:
    network = initialize(FAMILIES["transformers-llama"](), opt_level="O2")[0].network.eval()
    with cuda_dtypes() as seen:
        output = network.generate(TOKENS[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert output.shape == (2, 7)
    assert seen.attention_dtypes == {torch.bfloat16}
