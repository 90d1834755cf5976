"""A converted sequence used in another way than as a whole gives what the same layers give when nothing was taken over."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from octet.worker import initialize
from octet.worker.fp8.linear import Float8Linear

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU, "gelu-tanh": lambda: nn.GELU(approximate="tanh"), "relu": nn.ReLU, "silu": nn.SiLU,
}  # fmt: skip


class Named(nn.Sequential):
    """A subclass with the forward pass of its parent."""


def input_values() -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1))


def pair(
    make: Callable[[], nn.Module] = nn.GELU, container: type[nn.Sequential] = nn.Sequential
) -> tuple[nn.Sequential, list[nn.Module]]:
    """A converted sequence, and the same layers converted one by one, between which nothing is taken over."""
    torch.manual_seed(0)
    layers = container(nn.Linear(64, 128), make(), nn.Linear(128, 64), make(), nn.Linear(64, 64))
    apart = nn.ModuleList(copy.deepcopy(layers))
    sequence, _ = initialize(layers, opt_level="O2", statistics_every=0)
    initialize(apart, opt_level="O2", statistics_every=0)
    assert sequence[2].activation is not None
    return sequence, list(apart)


def run(layers: list[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("make", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_every_slice_and_every_index_is_what_it_was(make: Callable[[], nn.Module]) -> None:
    sequence, apart = pair(make)
    x = input_values()
    for stop in range(1, 6):
        assert torch.equal(sequence[:stop](x), run(apart[:stop], x))
    assert type(sequence[1]) is type(make())
    for start in (1, 2, 3):
        y = run(apart[:start], x)
        assert torch.equal(sequence[start](y), apart[start](y))
        assert torch.equal(sequence[start:](y), run(apart[start:], y))
    assert torch.equal(run(list(sequence), x), run(apart, x))
    assert torch.equal(checkpoint_sequential(sequence, 2, x, use_reentrant=False), run(apart, x))


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("kind", ["forward", "pre", "global"])
def test_hooks_see_what_they_would_see(kind: str, index: int) -> None:
    sequence, apart = pair()
    seen: list[list[Tensor]] = []
    for layers in (sequence, apart):
        found: list[Tensor] = []

        def note(
            module: nn.Module,
            args: tuple[Tensor, ...],
            output: Tensor,
            found: list[Tensor] = found,
            target: nn.Module = layers[index],
        ) -> None:
            if module is target:
                found += [args[0], output]

        if kind == "forward":
            handle = layers[index].register_forward_hook(note)
        elif kind == "pre":
            handle = layers[index].register_forward_pre_hook(lambda module, args, note=note: note(module, args, args[0]))
        else:
            handle = nn.modules.module.register_module_forward_hook(note)
        x = input_values().requires_grad_()
        (sequence(x) if layers is sequence else run(apart, x)).square().sum().backward()
        handle.remove()
        seen.append([*found, x.grad])
    assert len(seen[0]) == 3
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_a_hook_may_change_the_activation_and_a_backward_hook_its_gradient() -> None:
    sequence, apart = pair()
    gradients = []
    for layers in (sequence, apart):
        layers[1].register_forward_hook(lambda _module, _args, output: output * 2)
        layers[3].register_full_backward_hook(lambda _module, grad_input, _grad_output: (grad_input[0] * 3,))
        x = input_values().requires_grad_()
        (sequence(x) if layers is sequence else run(apart, x)).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_sequence_may_be_changed() -> None:
    sequence, apart = pair()
    x = input_values()
    sequence[1] = apart[1] = nn.Tanh()
    assert torch.equal(sequence(x), run(apart, x))
    del sequence[3]
    assert torch.equal(sequence(x), run([*apart[:3], apart[4]], x))


@pytest.mark.parametrize("container", [nn.Sequential, Named])
def test_copies_pickles_and_names(container: type[nn.Sequential]) -> None:
    sequence, apart = pair(container=container)
    x = input_values()
    buffer = io.BytesIO()
    torch.save(sequence, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(sequence), torch.load(buffer, weights_only=False)):
        assert isinstance(twin, container)
        assert torch.equal(twin(x), run(apart, x))
        assert torch.equal(twin[:2](x), run(apart[:2], x))
        assert isinstance(twin[2], Float8Linear)
    assert str(sequence).startswith(container.__name__ + "(")


def test_the_whole_sequence_still_keeps_the_activations_input_alone() -> None:
    sequence, apart = pair()
    sizes = []
    for layers in (sequence, apart):
        saved: dict[int, int] = {}

        def note(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = sequence(input_values()) if layers is sequence else run(apart, input_values())
        sizes.append(sum(saved.values()))
        del output
    assert sizes[1] - sizes[0] >= 16 * (128 + 64)
