"""The cross entropy equals torch's in loss and gradient, for any number of rows in fp32 at a time."""

import pytest
import torch
from torch.nn import functional

from octet.worker.models import cross_entropy as module
from octet.worker.models.cross_entropy import cross_entropy


@pytest.mark.parametrize("num_rows_at_once", [1, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradient_are_torchs(dtype: torch.dtype, num_rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 50 * num_rows_at_once)
    torch.manual_seed(0)
    values, targets = (5 * torch.randn(7, 50)).to(dtype), torch.randint(0, 50, (7,))
    values[2, targets[2]] = 60.0  # a confident and correct prediction: its gradient is close to zero
    expected_of, got_of = values.clone().requires_grad_(), values.clone().requires_grad_()
    expected, got = functional.cross_entropy(expected_of.float(), targets), cross_entropy(got_of * 1, targets)
    (3 * expected).backward()
    (3 * got).backward()
    torch.testing.assert_close(got, expected)  # both fp32
    assert expected_of.grad is not None
    # A sum in another order may round to the next code; an fp32 probability is the exponential of such a sum.
    codes = 10 if dtype == torch.float32 else 1
    torch.testing.assert_close(got_of.grad, expected_of.grad, rtol=2 * codes * torch.finfo(dtype).eps, atol=1e-7)


def test_a_second_backward_pass_is_refused_and_not_wrong() -> None:
    logits = torch.randn(3, 10, requires_grad=True)
    loss = cross_entropy(logits * 1, torch.tensor([0, 1, 2]))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
