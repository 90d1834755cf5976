"""What torch's clipping is handed of FP8 gradients is, whatever somebody does with it, what plain tensors are."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worker.fp8 import gradient_ops
from worker.fp8.clipping import let_torch_take_lists
from worker.fp8.gradient import Float8Gradient, RoundingPosition

Gradients = list[Tensor]
EPSILON = 1e-6


def gradients_of(num: int = 3, *, seed: int = 0) -> Gradients:
    """Gradients in FP8, each followed by one in fp32, of a norm above 1."""
    generator = torch.Generator().manual_seed(seed)
    found: Gradients = []
    for number in range(num):
        values = torch.randn(5 + number, 7, generator=generator)
        found += [Float8Gradient.quantize(values, RoundingPosition(seed, number)), torch.randn(9, generator=generator)]
    return found


def parameters_of(gradients: Gradients) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


def total_of(gradients: Gradients, order: float = 2.0) -> Tensor:
    """As torch has it."""
    norms = torch._foreach_norm(gradients, order)
    return torch.linalg.vector_norm(torch.stack([norm.to(gradients[0].device) for norm in norms]), order)


def factor_of(norm: Tensor, max_norm: float = 0.5) -> Tensor:
    return torch.clamp(max_norm / (norm + EPSILON), max=1.0)


@pytest.fixture(autouse=True)
def as_after_a_backward_pass() -> None:
    let_torch_take_lists()


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Runs something with norms of which nothing is known."""

    def run(work: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(gradient_ops, "known_norms", lambda _gradients, norms_N, *_: list(norms_N.unbind()))
            return work()

    return run


SCRIPT = torch.jit.CompilationUnit("""
def doubled(tensor):
    return tensor * 2
def double_(tensor):
    return tensor.mul_(2)
""")
"""Code that torch runs without asking a tensor's class."""
doubled, double_ = SCRIPT.doubled, SCRIPT.double_


def saved(tensor: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def in_place(make: Callable[[Gradients], Tensor]) -> Callable[[Gradients], Any]:
    def change(gradients: Gradients) -> Any:
        tensor = make(gradients)
        same = tensor.mul_(3)
        assert same is tensor
        tensor += 1
        tensor.clamp_(max=2.5)
        return tensor * 1, tensor.item()

    return change


def changed_between(gradients: Gradients) -> Any:
    norm = total_of(gradients)
    sums = norm + EPSILON
    norm.mul_(7)
    factor = torch.clamp(0.5 / sums, max=1.0)
    norm.add_(1)
    torch._foreach_mul_(gradients, factor)
    return norm, factor * 1


def changed_by_a_script(gradients: Gradients) -> Any:
    norm = total_of(gradients)
    factor = factor_of(norm)
    double_(norm)
    torch._foreach_mul_(gradients, factor)
    return norm * 1, factor * 1


def factor_changed_by_a_script(gradients: Gradients) -> Any:
    factor = factor_of(total_of(gradients))
    double_(factor)
    torch._foreach_mul_(gradients, factor)
    return factor * 1, doubled(factor)


def changed_before_by_a_script(gradients: Gradients) -> Any:
    norm = total_of(gradients)
    double_(norm)
    factor = factor_of(norm)
    torch._foreach_mul_(gradients, factor)
    return norm * 1, factor * 1


def norms_changed(gradients: Gradients) -> Any:
    norms = torch._foreach_norm(gradients, 2.0)
    double_(norms[1])
    stacked = torch.stack(norms)
    norms[0].fill_(9)
    return stacked * 1, torch.linalg.vector_norm(stacked, 2.0) * 1, [norm * 1 for norm in norms]


def stack_changed(gradients: Gradients) -> Any:
    norms = torch._foreach_norm(gradients, 2.0)
    stacked = torch.stack(norms)
    stacked[0] = 100
    return torch.linalg.vector_norm(stacked, 2.0) * 1, [norm * 1 for norm in norms], factor_of(total_of(gradients)) * 1


def stack_read_twice(gradients: Gradients) -> Any:
    norms = torch._foreach_norm(gradients, 2.0)
    stacked = torch.stack(norms)
    totals = [torch.linalg.vector_norm(stacked, 2.0) for _ in range(2)]
    totals[0].zero_()
    again = torch.linalg.vector_norm(torch.stack(norms), 2.0)
    return totals[1] * 1, again * 1, torch.linalg.vector_norm(stacked, math.inf) * 1, stacked * 1


def of_some(gradients: Gradients) -> Any:
    norms = torch._foreach_norm(gradients, 2.0)
    some = [torch.linalg.vector_norm(torch.stack(part), 2.0) * 1 for part in (norms[1:], norms[::-1], [*norms, norms[0]])]
    return some, torch.stack(norms, dim=0) * 1, torch.stack([*norms, torch.ones(())]) * 1


def clipped_twice(gradients: Gradients) -> Any:
    norm = nn.utils.get_total_norm(gradients)
    parameters = parameters_of(gradients)
    nn.utils.clip_grads_with_norm_(parameters[:3], 0.25, norm)
    nn.utils.clip_grads_with_norm_(parameters[:1:-1], 0.75, norm)
    nn.utils.clip_grads_with_norm_(parameters, 2.5, norm)
    return norm


def clipped_others(gradients: Gradients) -> Any:
    norm = nn.utils.get_total_norm(gradients)
    others = [*gradients_of(2, seed=1), torch.ones(4, dtype=torch.bfloat16), torch.ones(3)]
    gradients[0].mul_(2)
    nn.utils.clip_grads_with_norm_(parameters_of(others[:-1]), 0.25, norm)
    return norm, others


def used_by_hand(gradients: Gradients) -> Any:
    norm = nn.utils.get_total_norm(gradients)
    factor = 0.5 / (norm + EPSILON)
    if factor < 1:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm, factor * 1


def kept_factor(gradients: Gradients) -> Any:
    norm = total_of(gradients)
    factor = factor_of(norm)
    torch._foreach_mul_(gradients, factor)
    norm.zero_()
    torch._foreach_mul_(gradients, factor.to(norm.device))
    return norm, factor * 1


def in_inference_mode(gradients: Gradients) -> Any:
    with torch.inference_mode():
        norm = nn.utils.clip_grad_norm_(parameters_of(gradients), 0.5)
        return norm.is_inference(), norm.clone().tolist()


def read_in_inference_mode(gradients: Gradients) -> Any:
    factor = 0.5 / (total_of(gradients) + EPSILON)
    with torch.inference_mode():
        value = float(factor)
    leaf = factor.requires_grad_()
    (leaf * 2).backward()
    return value, leaf.grad, leaf.requires_grad


def differentiated(gradients: Gradients) -> Any:
    results = []
    for make in (total_of, lambda given: factor_of(total_of(given)), lambda given: total_of(given) + EPSILON):
        leaf = make(gradients).requires_grad_()
        (1.0 / (leaf + EPSILON)).square().backward()
        results += [leaf.grad, leaf.is_leaf, leaf.requires_grad]
    return results


def with_gradients_that_are_differentiated(gradients: Gradients) -> Any:
    plain = torch.ones(3, requires_grad=True)
    norms = torch._foreach_norm([gradients[0], plain * 2], 2.0)
    norm = torch.linalg.vector_norm(torch.stack(norms), 2.0)
    (norm + EPSILON).backward()
    return plain.grad


def a_gradient_that_is_kept_for_a_backward_pass(gradients: Gradients) -> Any:
    leaf = torch.ones(9, requires_grad=True)
    product = (leaf * gradients[1]).sum()
    nn.utils.clip_grad_norm_(parameters_of(gradients), 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    return []


def transformed(gradients: Gradients) -> Any:
    norm, factor = total_of(gradients), factor_of(total_of(gradients))
    both = [torch.func.grad(lambda x: 1.0 / (x + EPSILON))(each) for each in (norm, factor)]
    return both, torch.func.vmap(lambda x, y: x * y, in_dims=(0, None))(torch.ones(2), factor_of(total_of(gradients)))


def traced(gradients: Gradients) -> Any:
    norm, factor = total_of(gradients), factor_of(total_of(gradients))
    return make_fx(lambda x: 0.5 / (x + EPSILON))(norm)(torch.tensor(2.0)), factor * 1


def traced_whole(gradients: Gradients) -> Any:
    codes, plain = gradients[0].codes, gradients[1]

    def clip(scale: Tensor, plain: Tensor) -> Tensor:
        gradient = Float8Gradient(codes, scale, gradients[0].position)
        factor = factor_of(norm := total_of([gradient, plain]))
        torch._foreach_mul_([gradient, plain], factor)
        return norm

    program = make_fx(clip)(gradients[0].dequant_scale.clone(), plain.clone())
    return program(gradients[0].dequant_scale, plain)


def compiled(gradients: Gradients) -> Any:
    def use(norm: Tensor) -> Tensor:
        return 0.5 / (norm + EPSILON)

    return torch.compile(use, backend="eager")(total_of(gradients))


class Seen(TorchDispatchMode):
    """Looks at every tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, result)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, Float8Gradient):
                assert isinstance(leaf.shape, torch.Size)
                repr(leaf)
        return result


def under_a_mode(gradients: Gradients) -> Any:
    with Seen():
        return nn.utils.clip_grad_norm_(parameters_of(gradients), 0.5)


def copied(gradients: Gradients) -> Any:
    makes: list[Callable[[], Tensor]] = [
        lambda: torch._foreach_norm(gradients, 2.0)[0],
        lambda: torch.stack(torch._foreach_norm(gradients, 2.0)),
        lambda: total_of(gradients),
        lambda: total_of(gradients) + EPSILON,
        lambda: factor_of(total_of(gradients)),
    ]
    reads: list[Callable[[Tensor], Any]] = [
        lambda tensor: pickle.loads(pickle.dumps(tensor)),  # noqa: S301
        saved,
        copy.deepcopy,
        copy.copy,
        repr,
        str,
        Tensor.tolist,
        Tensor.detach,
        Tensor.clone,
        doubled,
        lambda tensor: tensor.numpy().tolist(),
        lambda tensor: torch.from_dlpack(tensor) * 1,
        lambda tensor: (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf, tensor.stride()),
        lambda tensor: tensor.data_ptr() % 4,
        lambda tensor: torch.ops.aten.mul.Tensor(tensor, 2),
        lambda tensor: torch.ones(3) * tensor.sum(),
    ]
    return [read(make()) for make in makes for read in reads]


SCENARIOS: dict[str, Callable[[Gradients], Any]] = {
    "clip": lambda gradients: nn.utils.clip_grad_norm_(parameters_of(gradients), 0.5),
    "clip, far": lambda gradients: nn.utils.clip_grad_norm_(parameters_of(gradients), 1e39),
    "clip, inf": lambda gradients: nn.utils.clip_grad_norm_(parameters_of(gradients), math.inf),
    "clip, integer": lambda gradients: nn.utils.clip_grad_norm_(parameters_of(gradients), 1),
    "clip, negative": lambda gradients: nn.utils.clip_grad_norm_(parameters_of(gradients), -1.0),
    "clip twice": lambda gradients: [nn.utils.clip_grad_norm_(parameters_of(gradients), size) for size in (0.5, 0.25)],
    "error if not finite": lambda gradients: nn.utils.clip_grad_norm_(parameters_of(gradients), 0.5, error_if_nonfinite=True),
    **{
        f"order {order}": lambda gradients, order=order: nn.utils.clip_grad_norm_(parameters_of(gradients), 0.5, order)
        for order in (0, 1, 3, math.inf, -1.0)
    },
    "foreach": lambda gradients: nn.utils.clip_grad_norm_(parameters_of(gradients), 0.5, foreach=True),
    "one by one": lambda gradients: nn.utils.clip_grad_norm_(parameters_of(gradients), 0.5, foreach=False),
    "one by one after": lambda gradients: nn.utils.clip_grads_with_norm_(
        parameters_of(gradients), 0.5, nn.utils.get_total_norm(gradients), foreach=False
    ),
    "total alone": lambda gradients: nn.utils.get_total_norm(gradients) * 1,
    "clipped twice": clipped_twice,
    "clipped others": clipped_others,
    "used by hand": used_by_hand,
    "kept factor": kept_factor,
    "changed between": changed_between,
    "changed by a script": changed_by_a_script,
    "changed before by a script": changed_before_by_a_script,
    "factor changed by a script": factor_changed_by_a_script,
    "norms changed": norms_changed,
    "stack changed": stack_changed,
    "stack read twice": stack_read_twice,
    "of some": of_some,
    "norm in place": in_place(total_of),
    "factor in place": in_place(lambda gradients: factor_of(total_of(gradients))),
    "stack in place": lambda gradients: torch.stack(torch._foreach_norm(gradients, 2.0)).mul_(2) * 1,
    "out": lambda gradients: torch.add(factor_of(norm := total_of(gradients)), 1, out=norm) * 1,
    "out of the factor": lambda gradients: torch.add(total_of(gradients), 1, out=(out := factor_of(total_of(gradients)))) * out,
    "inference mode": in_inference_mode,
    "read in inference mode": read_in_inference_mode,
    "differentiated": differentiated,
    "gradients that are differentiated": with_gradients_that_are_differentiated,
    "a gradient that is kept": a_gradient_that_is_kept_for_a_backward_pass,
    "transformed": transformed,
    "traced": traced,
    "traced as a whole": traced_whole,
    "compiled": compiled,
    "under a mode": under_a_mode,
    "copied": copied,
    "mixed dtypes": lambda gradients: nn.utils.clip_grad_norm_(
        parameters_of(gradients) + parameters_of([torch.ones(3, dtype=torch.bfloat16)]), 0.5
    ),
}
"""Things that a user may do. Each returns tensors and numbers."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_results_are_those_of_plain_norms(name: str, plainly: Any) -> None:
    ours, expected = gradients_of(), gradients_of()
    found, plain = SCENARIOS[name](ours), plainly(lambda: SCENARIOS[name](expected))
    pairs = zip(tree_leaves((found, ours)), tree_leaves((plain, expected)), strict=True)
    for one, other in pairs:
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one + 0, other + 0), name
        else:
            assert one == other
