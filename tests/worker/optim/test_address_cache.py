"""A step uses the last step's tables of addresses only while they hold: it steps what is there, whatever was replaced."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from octet import initialize
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.fp8.weight import hold, stored
from octet.worker.kernels.cuda import language
from octet.worker.optim import LowBitAdamW
from octet.worker.optim.origin import Origin
from octet.worker.optim.sharding import cut_into_pieces
from tests.kit.stored_weights import parts_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of the interpreter
    pytest.mark.skipif(
        not language.INTERPRETED.value, reason="missing: Triton's interpreter, TRITON_INTERPRET=1 before the start"
    ),
]


class Trained:
    """An FP8 layer, a plain parameter, and the fused optimizer of both."""

    def __init__(self, level: str) -> None:
        torch.manual_seed(0)
        model, _ = initialize(nn.Sequential(nn.Linear(32, 32)), None, level, auto_filter=False)
        layer = model.get_submodule("0")
        assert isinstance(layer, Float8Linear)
        self.model, self.layer, self.plain = model, layer, nn.Parameter(torch.randn(200))
        assert layer.bias is not None
        self.parameters: list[nn.Parameter] = [layer.weight, layer.bias, self.plain]
        self.optimizer = LowBitAdamW(self.parameters, fused=True)
        self.num_steps, self.in_fp8 = 0, True

    def step(self, *, forgets: bool) -> bool:
        """Take a step by new gradients. Returns whether it has used the tables of the step before. forgets: it has none."""
        if forgets:
            self.optimizer._stepper.cache = None
        before, draw = self.optimizer._stepper.cache, torch.Generator().manual_seed(self.num_steps)
        self.num_steps += 1
        for parameter in self.parameters:
            values, parameter.grad_dtype = torch.randn(parameter.shape, generator=draw), None
            if parameter is self.layer.weight and self.in_fp8:
                parameter.grad = Float8Gradient.quantize(values, RoundingPosition(0, 0))
            else:
                parameter.grad = values.to(parameter.dtype) if parameter is not self.layer.weight else values
        self.optimizer.step()
        return before is not None and self.optimizer._stepper.cache is before

    def tensors(self) -> list[Tensor]:
        assert self.layer.encoded is not None
        found = [part.detach() for part in (*parts_of(self.layer.encoded), self.layer.bias, self.plain)]
        for state in self.optimizer.state.values():
            found += [state["step"], *(part for value in state.values() if isinstance(value, dict) for part in value.values())]
        return [part.contiguous().view(-1).view(torch.uint8).clone() for part in found]


Change = Callable[[Trained], object]


def replace_data(trained: Trained) -> None:
    """Hold everything elsewhere, codes too, as ZeRO does."""
    for parameter in trained.parameters:
        hold(parameter, stored(parameter).detach().clone())


def assign(trained: Trained) -> None:
    with torch.no_grad():
        trained.layer.weight.copy_(torch.linspace(-1, 1, 1024).view(32, 32))


def zero(trained: Trained) -> None:
    with torch.no_grad():
        trained.layer.weight.zero_()


def scale(trained: Trained) -> None:
    """Write what the optimizer rounds stochastically before its next step."""
    with torch.no_grad():
        trained.layer.weight.mul_(1 - 1e-5)


def replace_states(trained: Trained) -> None:
    for state in trained.optimizer.state.values():
        state["exp_avg"]["codes"], state["exp_avg_sq"] = state["exp_avg"]["codes"].clone(), dict(state["exp_avg_sq"])
        state["step"] = state["step"].clone()


def load_optimizer(trained: Trained) -> None:
    trained.optimizer.load_state_dict(trained.optimizer.state_dict())


def freeze(trained: Trained) -> None:
    bias = trained.parameters[1].requires_grad_(False)
    bias.grad = None
    trained.parameters = [part for part in trained.parameters if part is not bias]


def cast(trained: Trained) -> None:
    trained.plain.data = trained.plain.data.bfloat16()


def shorten(trained: Trained) -> None:
    trained.plain.grad = None
    trained.plain.data = trained.plain.data[:192]
    for name in ("exp_avg", "exp_avg_sq"):
        parts = trained.optimizer.state[trained.plain][name]
        parts["codes"] = parts["codes"][:192]


def regroup(trained: Trained) -> None:
    added = nn.Parameter(torch.ones(130))
    trained.parameters.append(added)
    trained.optimizer.add_param_group({"params": [added], "lr": 0.5})


def reshard(trained: Trained) -> None:
    cut_into_pieces(trained.optimizer, {trained.plain: range(128, 200)})
    [piece] = trained.optimizer.pieces.values()
    trained.parameters[-1] = piece


def redraw(trained: Trained) -> None:
    weight, optimizer = trained.layer.weight, trained.optimizer
    optimizer.hold(weight, weight, Origin(7, 0, weight.numel()), optimizer.quantized[weight], optimizer.state[weight])


def swap_groups(trained: Trained) -> None:
    trained.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(8))], "lr": 0.25})
    trained.optimizer.param_groups.reverse()


def move(trained: Trained) -> None:
    trained.model._apply(lambda tensor: tensor.clone())  # type: ignore[no-untyped-call]


STALE: list[Change] = [
    replace_data, assign, scale, replace_states, load_optimizer, freeze, cast, shorten, regroup, reshard, redraw, swap_groups,
    move,
]  # fmt: skip


def set_rate(trained: Trained) -> None:
    trained.optimizer.param_groups[0]["lr"] = 0.125


def widen_gradient(trained: Trained) -> None:
    trained.in_fp8 = False


def decay(trained: Trained) -> None:
    trained.optimizer.param_groups[0]["weight_decay"] = 0.5


@pytest.mark.parametrize(
    ("level", "change"),
    [
        *(pytest.param("O2", change, marks=[pytest.mark.system] * (change not in (scale, cast))) for change in STALE),
        *(
            pytest.param("O3-split", change, marks=[pytest.mark.matrix if change is not cast else pytest.mark.system])
            for change in STALE
        ),
    ],
)
def test_what_is_replaced_between_steps_is_stepped(level: str, change: Change) -> None:
    watching, forgetting = Trained(level), Trained(level)
    for trained in (watching, forgetting):
        for number in range(4):
            if number == 2:
                change(trained)
            used = trained.step(forgets=trained is forgetting)
            assert used == (trained is watching and number in (1, 3)), number
    assert all(map(torch.equal, watching.tensors(), forgetting.tensors()))


@pytest.mark.parametrize("change", [set_rate, widen_gradient, decay, zero])
def test_what_keeps_its_place_changes_without_new_rows(change: Change) -> None:
    watching, forgetting = Trained("O2"), Trained("O2")
    for trained in (watching, forgetting):
        for number in range(3):
            if number == 2:
                change(trained)
            assert trained.step(forgets=trained is forgetting) == (trained is watching and number > 0)
    assert all(map(torch.equal, watching.tensors(), forgetting.tensors()))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_values_that_are_loaded_are_stepped(level: str) -> None:
    """At O3 the optimizer makes a new master weight of them."""
    watching, forgetting = Trained(level), Trained(level)
    for trained in (watching, forgetting):
        for number in range(3):
            if number == 2:
                draw = torch.Generator().manual_seed(5)
                trained.model.load_state_dict({"0.weight": torch.randn(32, 32, generator=draw), "0.bias": torch.ones(32)})
            trained.step(forgets=trained is forgetting)
    assert all(map(torch.equal, watching.tensors(), forgetting.tensors()))


def test_a_parameter_that_was_replaced_is_refused_in_later_steps_too() -> None:
    trained = Trained("O2")
    trained.step(forgets=False)
    trained.step(forgets=False)
    trained.layer.weight = nn.Parameter(trained.layer.weight.detach())
    trained.parameters[0].grad_dtype = None
    with pytest.raises(ValueError, match="holds another parameter than the optimizer"):
        trained.step(forgets=False)


def test_a_state_that_was_replaced_is_not_kept() -> None:
    trained = Trained("O2")
    trained.step(forgets=False)
    before = weakref.ref(trained.optimizer.state[trained.plain]["exp_avg"]["codes"])
    replace_states(trained)
    assert before() is None
