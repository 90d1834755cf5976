"""Norms in bf16 next to their fp32 twins, of torch and of transformers; saved, loaded, and left alone where they are others."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from octet.worker import export, initialize, load_pretrained
from octet.worker.fp8.norms import HalfNorm
from tests.kit.small_model import make
from tests.worker.integrations.tiny import evaluated_loss, examples, llama

BF16 = 2.0**-8
"""The relative error of one rounding to bf16."""


@pytest.mark.parametrize("make_norm", [nn.LayerNorm, nn.RMSNorm, LlamaRMSNorm, T5LayerNorm], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_fp32_norm_rounded_once(make_norm: type[nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), make_norm(64))
    for parameter in model[1].parameters():
        nn.init.normal_(parameter, mean=1.0)
        parameter.data = parameter.data.to(torch.bfloat16).float()  # so that the cast of weights rounds nothing
    twin = copy.deepcopy(model[1])
    model, _ = initialize(model, torch.optim.AdamW(model.parameters()), "O2", norms="bf16")
    assert model.octet_report.norms == ("1",)
    norm = model[1]
    assert isinstance(norm, HalfNorm)
    values = (torch.randn(8, 64) * 30 + 100).to(dtype)  # in bf16, statistics of such numbers would be off by far
    ours, theirs = (values.clone().requires_grad_() for _ in range(2))
    output, expected = norm(ours), twin(theirs.float())
    assert output.dtype == torch.bfloat16
    assert (output.float() - expected).abs().max() <= BF16 * expected.abs().max()
    (output.float() * values.float().sin()).sum().backward()
    (expected * values.float().sin()).sum().backward()
    for mine, fp32 in [(ours, theirs), *zip(norm.parameters(), twin.parameters(), strict=True)]:
        assert mine.grad is not None
        assert fp32.grad is not None
        assert (mine.grad.float() - fp32.grad.float()).norm() < 2 * BF16 * fp32.grad.float().norm()


@pytest.mark.parametrize(
    "level", ["O3", *(pytest.param(level, marks=pytest.mark.matrix) for level in ("te", "bf16-amp", "ao"))]
)
def test_a_llama_trains_is_saved_and_loaded(level: str, tmp_path: Path) -> None:
    """Under autocast, which Llama's rotary embedding needs: it returns queries in the dtype of the word embeddings."""
    with torch.autocast("cpu", torch.bfloat16):
        check_llama(level, tmp_path)


def check_llama(level: str, tmp_path: Path) -> None:
    rows = examples(8)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def train(norms: str) -> tuple[LlamaForCausalLM, torch.optim.Optimizer, list[float]]:
        model = llama()
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), level, norms=norms)
        losses = []
        for _ in range(4):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return model, optimizer, losses

    _, _, expected = train("fp32")
    model, optimizer, losses = train("bf16")
    assert expected[-1] < 0.98 * expected[0]
    assert losses == pytest.approx(expected, rel=0.02)
    assert len(model.octet_report.norms) == 3
    norm = model.model.norm
    assert norm.weight.dtype == torch.bfloat16
    assert not torch.equal(norm.weight, torch.ones_like(norm.weight)), "its weight is not trained"

    model.save_pretrained(tmp_path / "plain")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    assert torch.equal(loaded.model.norm.weight, norm.weight.float())
    assert evaluated_loss(loaded, rows) == pytest.approx(evaluated_loss(model, rows), rel=5e-3)
    export(model, optimizer, tmp_path / "out", format="fp32")
    again, _ = load_pretrained(tmp_path / "out", level, norms="bf16")
    assert torch.equal(again.model.norm.weight, norm.weight)
    assert evaluated_loss(again, rows) == pytest.approx(evaluated_loss(model, rows), rel=5e-3)


class NormedTwice(nn.Module):
    """A norm that this module does not know next to one that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.other, self.linear = LlamaRMSNorm(32), Gemma2RMSNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.known(x) + self.other(x))


def test_a_norm_that_computes_something_else_stays() -> None:
    model, _ = initialize(NormedTwice(), opt_level="O2", norms="bf16")
    assert isinstance(model.known, HalfNorm)
    assert isinstance(model.other, Gemma2RMSNorm)
    assert "in fp32   other: Gemma2RMSNorm computes something else than an RMS norm" in str(model.octet_report)


def test_it_is_off_by_default_and_refused_where_it_cannot_be() -> None:
    model, _ = make("O2")
    assert model.norm.weight.dtype == torch.float32
    norms = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
    for level in ("fp32", "fp16-amp"):
        with pytest.raises(ValueError, match=f"norms: got bf16 at level {level}; allowed: bf16 where products"):
            initialize(norms, opt_level=level, norms="bf16")
    with pytest.raises(ValueError, match="norms is bf16 and the optimizer a SGD"):
        initialize(norms, torch.optim.SGD(norms.parameters()), "te", norms="bf16")
    with pytest.raises(ValueError, match="no norm of the model can be"):
        initialize(nn.Sequential(nn.Linear(32, 32), Gemma2RMSNorm(32)), opt_level="O2", norms="bf16")
    assert type(norms[0]) is nn.Linear
    assert norms[1].weight.dtype == torch.float32
