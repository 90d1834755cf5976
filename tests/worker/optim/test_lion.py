"""LowBitLion against Lion written down plainly in fp32, and at every level."""

import copy

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize, memory_report
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.optim import Hyperparameters, LionHyperparameters, LowBitAdamW, LowBitLion
from octet.worker.optim.codecs import CODECS
from octet.worker.optim.rules.lion import Lion
from tests.kit.small_model import spread
from tests.kit.stored_weights import KINDS, stored_weight
from tests.numerics.measure import relative_error

NUM_STEPS = 6


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def plain_lion(weight: Tensor, gradients: list[Tensor], lr: float, betas: tuple[float, float], decay: float) -> Tensor:
    """Chen et al. 2023, algorithm 2, in fp32."""
    theta, momentum = weight.clone(), torch.zeros_like(weight)
    for gradient in gradients:
        update = torch.sign(betas[0] * momentum + (1 - betas[0]) * gradient)
        momentum = betas[1] * momentum + (1 - betas[1]) * gradient
        theta = theta - lr * (update + decay * theta)
    return theta


def step_through(parameter: Tensor, optimizer: LowBitLion, gradients: list[Tensor]) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98), (0.0, 0.5)])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_fp32_is_the_papers(betas: tuple[float, float], decay: float) -> None:
    weight, gradients = gaussian(64, 100), [gaussian(64, 100, seed=seed) for seed in range(1, NUM_STEPS)]
    gradients[0][:3] = 0  # an average of zero moves nothing
    parameter = nn.Parameter(weight.clone())
    defaults = LionHyperparameters(1e-3, betas, decay, exp_avg_codec="fp32")
    step_through(parameter, LowBitLion([parameter], defaults), gradients)
    torch.testing.assert_close(parameter.detach(), plain_lion(weight, gradients, 1e-3, betas, decay), rtol=1e-6, atol=1e-8)


def test_maximize_climbs() -> None:
    parameter = nn.Parameter(torch.zeros(4096))
    step_through(parameter, LowBitLion([parameter], LionHyperparameters(lr=0.5, maximize=True)), [torch.ones(4096)])
    assert torch.equal(parameter.detach(), torch.full((4096,), 0.5))


@pytest.mark.parametrize("codec", Lion.state_codecs["exp_avg"])
def test_every_codec_follows_fp32(codec: str) -> None:
    """Steady gradients with noise: few signs differ from fp32's."""
    base, wide = gaussian(64, 128), nn.Parameter(torch.zeros(64, 128))
    stored = nn.Parameter(torch.zeros(64, 128))
    gradients = [base + 0.1 * gaussian(64, 128, seed=seed) for seed in range(1, 20)]
    step_through(wide, LowBitLion([wide], LionHyperparameters(1e-3, exp_avg_codec="fp32")), gradients)
    optimizer = LowBitLion([stored], LionHyperparameters(1e-3, exp_avg_codec=codec))
    step_through(stored, optimizer, gradients)
    assert relative_error(stored.detach(), wide.detach()) < 0.05
    assert set(optimizer.state[stored]) == {"step", "exp_avg"}
    assert set(optimizer.state[stored]["exp_avg"]) == set(CODECS[codec].parts)


@pytest.mark.parametrize("kind", KINDS)
class TestStoredWeight:
    def test_keeps_a_steady_drift(self, kind: str) -> None:
        """Every weight moves by lr: a relative 1e-5 per step, a hundredth of FP16's step between numbers."""
        values = gaussian(128, 256)
        lr = 1e-5 * float(values.square().mean().sqrt())
        weight = stored_weight(values, kind)
        optimizer = LowBitLion([weight], LionHyperparameters(lr))
        start = weight.dequantize().double().mean()
        step_through(weight, optimizer, [-torch.ones_like(values)] * 100)
        kept = float(weight.dequantize().double().mean() - start) / (100 * lr)
        assert 0.95 <= kept <= 1.05, f"kept {kept:.3f} of the drift"

    @pytest.mark.parametrize("decay", [0.0, 0.5])
    def test_one_pass_never_saturates(self, kind: str, decay: float) -> None:
        """The scale comes from the bound: lr, and what decay leaves of the largest weight."""
        values = torch.zeros(16, 256)
        weight, wide = stored_weight(values, kind), nn.Parameter(values.clone())
        defaults = LionHyperparameters(0.02, weight_decay=decay, exp_avg_codec="fp32")
        optimizer, reference = LowBitLion([weight], defaults), LowBitLion([wide], defaults)
        for seed in range(12):
            for parameter, stepped in ((weight, optimizer), (wide, reference)):
                step_through(parameter, stepped, [gaussian(16, 256, seed=seed) + 0.02])
            largest = float(wide.detach().abs().amax())
            assert float(weight.values_amax) == pytest.approx(largest, rel=1e-2)
            assert largest / float(weight.dequant_scale) <= (65504 if kind == "fp16" else 448), f"step {seed} saturated"
        torch.testing.assert_close(weight.dequantize(), wide.detach(), rtol=5e-3, atol=1e-3)


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("level", spread(LEVELS))
def test_trains_and_resumes_at_every_level(level: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        made = initialize(model, LowBitLion(model.parameters(), LionHyperparameters(2e-3)), opt_level=level, seed=3)
        assert made[1] is not None
        return made[0], made[1]

    model, optimizer = make()
    assert isinstance(optimizer, LowBitLion)
    assert optimizer.param_groups[0]["exp_avg_codec"] == LEVELS[level].exp_avg
    assert optimizer.seed == 3
    losses = train(model, optimizer, range(20))
    assert losses[-1] < 0.8 * losses[0]
    held = memory_report(model, optimizer)
    assert held["exp_avg"] > 0
    assert held["exp_avg_sq"] == 0

    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, range(20, 23))
    model, optimizer = make()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert train(model, optimizer, range(20, 23)) == expected


class TestTakingOver:
    def test_a_stepped_optimizer_keeps_its_states(self) -> None:
        model, reference = small_model(), small_model()
        fp32 = LionHyperparameters(1e-3, exp_avg_codec="fp32")
        first, second = LowBitLion(model.parameters(), fp32), LowBitLion(reference.parameters(), fp32)
        train(model, first, range(3)), train(reference, second, range(3))
        model, adopted = initialize(model, first, opt_level="fp32")
        assert adopted is not None
        assert train(model, adopted, range(3, 6)) == train(reference, second, range(3, 6))

    def test_a_group_may_name_its_codec(self) -> None:
        model = small_model()
        groups = [{"params": model[0].parameters(), "exp_avg_codec": "int8-companded"}, {"params": model[2].parameters()}]
        _, optimizer = initialize(model, LowBitLion(groups), opt_level="O1")
        assert optimizer is not None
        assert [group["exp_avg_codec"] for group in optimizer.param_groups] == ["int8-companded", "fp32"]

    def test_our_own_adamw(self) -> None:
        model = small_model()
        _, optimizer = initialize(model, LowBitAdamW(model.parameters(), Hyperparameters(lr=2e-3)), opt_level="O2-8bit")
        assert isinstance(optimizer, LowBitAdamW)
        group = optimizer.param_groups[0]
        assert (group["lr"], group["exp_avg_codec"], group["exp_avg_sq_codec"]) == (2e-3, "int8-companded", "uint8-companded")


def test_holds_fp8_gradients() -> None:
    model = small_model()
    model, optimizer = initialize(model, LowBitLion(model.parameters()), opt_level="O2")
    assert optimizer is not None
    train(model, optimizer, range(1))
    assert isinstance(model[0].weight.grad, Float8Gradient)


class TestRefusals:
    def test_states_of_another_rule(self) -> None:
        model = small_model()
        adam = LowBitAdamW(model.parameters())
        train(model, adam, range(1))
        with pytest.raises(ValueError, match="the saved states are exp_avg, exp_avg_sq; allowed: exp_avg, the states of lion"):
            LowBitLion(model.parameters()).load_state_dict(adam.state_dict())

    def test_hyperparameters_of_another_rule(self) -> None:
        with pytest.raises(TypeError, match="defaults is a Hyperparameters; allowed: LionHyperparameters"):
            LowBitLion(small_model().parameters(), Hyperparameters())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"lr": -1.0}, "lr is -1.0; allowed: at least 0"),
            ({"exp_avg_codec": "uint8-companded"}, "is 'uint8-companded'; allowed"),
        ],
    )
    def test_options(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            LowBitLion(small_model().parameters(), LionHyperparameters(**options))  # type: ignore[arg-type]
