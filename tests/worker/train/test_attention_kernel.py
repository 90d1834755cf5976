"""`training.attention_kernel: fa3` runs the installed package by torch's own registry, or the rank says why it cannot.

The package is a stand-in that defines the ops which torch looks for, and attends on a CPU. All between our call and these ops
is torch's: its kernels for CUDA get CPU tensors that say that they are on CUDA.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.backends import cuda
from torch.nn import attention as registry
from torch.nn import functional

from octet.api_schemas import JobSpec, explain
from octet.api_schemas.plan import TraceRequest, trace_key
from octet.worker.common.errors import InvalidConfig
from octet.worker.kernels import reference
from octet.worker.kernels.cuda import attention as documents
from octet.worker.rank.main import main
from octet.worker.train.passes import attention_kernel, deterministic

DEVICE = torch.device("cuda", 0)
ROWS, MODULE = (2, 2, 12, 16), "flash_attn_interface.py"
PACKAGE = '''
import torch

calls = []
lib = torch.library.Library("flash_attn_3", "DEF")
lib.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? qv, Tensor(a!)? out, Tensor? starts, "
    "Tensor? k_starts, Tensor? new_starts, Tensor? used_q, Tensor? used_k, int? max_q, int? max_k, Tensor? table, "
    "Tensor? index, Tensor? pad, Tensor? cos, Tensor? sin, Tensor? rotary, Tensor? q_scale, Tensor? k_scale, "
    "Tensor? v_scale, float? scale, bool causal, int left, int right, int chunk, float softcap, bool interleaved, "
    "Tensor? metadata, int num_splits, bool? pack_gqa, int margin) -> (Tensor, Tensor, Tensor, Tensor)"
)
lib.define(
    "bwd(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, "
    "Tensor? starts, Tensor? k_starts, Tensor? used_q, Tensor? used_k, int? max_q, int? max_k, float? scale, bool causal, "
    "int left, int right, float softcap, bool deterministic, int margin) -> Tensor"
)


def attend(heads, starts, scale, causal):
    """Causal attention of heads (B, T, H, d), or (N, H, d) with where documents begin."""
    assert causal
    sizes = [heads[0].shape[1]] * len(heads[0]) if starts is None else starts.diff().tolist()
    runs = [each.flatten(0, -3).float().split(sizes) for each in heads]
    mixed = []
    for q, k, v in zip(*runs):
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        hidden = torch.ones(scores.shape[1:]).triu(1).bool()
        mixed.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(mixed).view_as(heads[0])


def fwd(q, k, v, *rest):
    out, starts, scale, causal, num_splits = rest[3], rest[4], rest[20], rest[21], rest[28]
    calls.append(("fwd", num_splits))
    mixed = attend((q, k, v), starts, scale, causal).to(q.dtype)
    tokens = q.flatten(0, -3)
    logsumexp = torch.zeros(tokens.shape[1], len(tokens))
    return mixed if out is None else out.copy_(mixed), logsumexp, logsumexp.clone(), logsumexp.clone()


def bwd(grad, q, k, v, out, lse, dq, dk, dv, starts, *rest):
    calls.append(("bwd", rest[10]))
    with torch.enable_grad():
        heads = [each.detach().requires_grad_() for each in (q, k, v)]
        gradients = torch.autograd.grad(attend(heads, starts, *rest[5:7]), heads, grad.float())
    for held, gradient in zip((dq, dk, dv), gradients):
        held.copy_(gradient)
    return torch.zeros(1)


lib.impl("fwd", fwd, "CPU")
lib.impl("bwd", bwd, "CPU")
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The stand-in, on the search path. A process can define its ops once."""
    folder = tmp_path_factory.mktemp("package")
    (folder / MODULE).write_text(PACKAGE)
    sys.path.insert(0, str(folder))
    import flash_attn_interface  # type: ignore[import-not-found, unused-ignore]

    yield flash_attn_interface
    sys.path.remove(str(folder))
    del sys.modules["flash_attn_interface"]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_device: (9, 0))


def cuda_s(name: str) -> Callable[..., Any]:
    """Return torch's op as it is for tensors on CUDA."""
    op, keys = getattr(torch.ops.aten, name).default, torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return lambda *args, **options: op.redispatch(keys, *args, **options)


class OnCuda:
    """`torch.ops.aten` of a CUDA device."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return cuda_s(name)


def drawn(*shape: int, num: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator).bfloat16() for _ in range(num)]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.usefixtures("hopper")
def test_torch_s_attention_runs_the_package(package: Any, is_deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both passes, in a fixed order of sums where the run is deterministic. Before and after, torch's own kernels run."""
    query, key, value, grad = drawn(*ROWS)
    forward, backward = (cuda_s(f"_scaled_dot_product_flash_attention{end}") for end in ("", "_backward"))
    package.calls.clear()
    with attention_kernel("fa3", DEVICE), deterministic(is_deterministic), monkeypatch.context() as patched:
        patched.setattr(Tensor, "is_cuda", True)
        assert registry.current_flash_attention_impl() == "FA3"
        assert (cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled()) == (True, False, False)
        output, logsumexp, _, _, num_q, num_k, seed, offset, _ = forward(query, key, value, 0.0, True)
        found = backward(grad, query, key, value, output, logsumexp, None, None, num_q, num_k, 0.0, True, seed, offset)
    assert package.calls == [("fwd", int(is_deterministic)), ("bwd", is_deterministic)]
    heads = [each.float().requires_grad_() for each in (query, key, value)]
    expected = functional.scaled_dot_product_attention(*heads, is_causal=True)
    close(output, expected.detach())
    for one, other in zip(found, torch.autograd.grad(expected, heads, grad.float()), strict=True):
        close(one, other)
    assert registry.current_flash_attention_impl() is None
    assert cuda.math_sdp_enabled()
    assert cuda.mem_efficient_sdp_enabled()
    with pytest.raises(NotImplementedError, match="CUDA"):  # torch for a CPU has no kernel of its own there
        forward(query, key, value, 0.0, True)


@pytest.mark.usefixtures("hopper")
def test_documents_run_the_package(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, grad = drawn(*ROWS)
    starts = torch.tensor([0, 5, 12, 24], dtype=torch.int32)
    where = starts, starts, 0.25, 0
    monkeypatch.setattr(documents, "aten", OnCuda())
    monkeypatch.setattr(documents, "takes_flash", lambda query: query.dtype.itemsize == 2)
    package.calls.clear()
    with attention_kernel("fa3", DEVICE), monkeypatch.context() as patched:
        patched.setattr(Tensor, "is_cuda", True)
        output, logsumexp = documents.document_attention(query, key, value, *where)
        found = documents.document_attention_backward(grad, [query, key, value], output, logsumexp, *where)
        with pytest.raises(ValueError, match=r"FA3 was chosen.*float32 heads of 16.*allowed: 16 bits and 256 elements"):
            documents.document_attention(query.float(), key.float(), value.float(), *where)
    assert package.calls == [("fwd", 0), ("bwd", False)]
    expected, sums = reference.document_attention(query, key, value, *where)
    close(output, expected)
    of = reference.document_attention_backward(grad, [query, key, value], expected, sums, *where)
    for one, other in zip(found, of, strict=True):
        close(one, other)


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [
        (torch.device("cpu"), (9, 0), "this rank runs on a CPU; allowed: fa3 on compute capability 9.0"),
        (DEVICE, (8, 9), "this rank runs on compute capability 8.9; allowed"),
        (DEVICE, (10, 0), "this rank runs on compute capability 10.0; allowed"),
    ],
)
def test_another_device_is_refused(
    device: torch.device, capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_device: capability)
    with pytest.raises(InvalidConfig, match=expected), attention_kernel("fa3", device):
        pytest.fail("it began")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("source", "expected"),
    [(None, "No module named 'flash_attn_interface'"), ("raise ImportError('undefined symbol: at')", "undefined symbol: at")],
)
def test_a_rank_without_the_package_names_it(
    source: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source is not None:
        (tmp_path / MODULE).write_text(source)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if not (Path(path) / MODULE).exists())])
    words = rf"package flash_attn_3 \({expected}\); allowed.*Install it from the folder hopper"
    with pytest.raises(InvalidConfig, match=words), attention_kernel("fa3", DEVICE):
        pytest.fail("it began")
    assert registry.current_flash_attention_impl() is None
    assert cuda.math_sdp_enabled()


def test_a_rank_ends_at_its_start_where_it_cannot(
    tmp_path: Path, spec_document: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    spec_document["training"]["attention_kernel"] = "fa3"
    spec_document["precision"] = {"level": "O2"}
    (tmp_path / "job.json").write_text(json.dumps(spec_document))
    caplog.set_level(logging.INFO)
    assert main([str(tmp_path / "job.json"), "--job-dir", str(tmp_path / "run")]) == 1
    assert "attention: FlashAttention-3" in caplog.messages
    assert any("fa3, and this rank runs on a CPU; allowed" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"precision": "fp32"}, "torch at level fp32: FlashAttention-3 attends in 16 bits"),
        (
            {"model": "roberta-tiny", "data": {"path": "/data/corpus"}},
            "torch, or fa3 with gpt, llama: the attention of other families may have masks and dropout, which FlashAttention-3 "
            "does not take",
        ),
    ],
)
def test_jobs_whose_attention_it_does_not_take_are_refused(change: dict[str, Any], expected: str) -> None:
    document = {"name": "first", "model": "gpt-tiny", "data": {"path": "/data/corpus"}, "precision": "O2"}
    document |= {"training": {"steps": 8, "attention_kernel": "fa3"}}
    job = JobSpec.model_validate(document)
    plain = JobSpec.model_validate(document | {"training": {"steps": 8}})
    assert trace_key(TraceRequest(id="a", job=job)) == trace_key(TraceRequest(id="b", job=plain)), "both hold the same bytes"
    with pytest.raises(ValidationError) as refused:
        JobSpec.model_validate(document | change)
    (violation,) = explain(refused.value, JobSpec)
    assert (violation.field, violation.allowed) == ("training.attention_kernel", expected)
