"""LowBitMuon against torch.optim.Muon and AdamW, against singular values in fp64, and at every level."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize, memory_report
from octet.worker.optim import LowBitMuon, MuonHyperparameters, muon_groups, walker
from octet.worker.optim.rules.muon import LARGEST_ELEMENT, OrthogonalizedMomentum, newton_schulz
from tests.kit.small_model import spread
from tests.kit.stored_weights import KINDS, stored_weight
from tests.numerics.measure import relative_error

FP32 = {"exp_avg_codec": "fp32", "exp_avg_sq_codec": "fp32"}
SHAPES = ((96, 64), (64, 96), (64, 64), (7, 130))


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def step_through(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, gradients: list[list[Tensor]]) -> None:
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def torchs_muon(parameters: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, adjust_lr_fn="match_rms_adamw", **options)


class TestNewtonSchulz:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_in_bf16_it_is_torchs(self, shape: tuple[int, ...]) -> None:
        """torch.optim.Muon, which always multiplies in bf16, moves a weight of 0 by -lr × 0.2 × sqrt(max) × direction."""
        gradient, weight = gaussian(*shape), nn.Parameter(torch.zeros(shape))
        step_through([weight], torchs_muon([weight], lr=1.0, momentum=0.0, weight_decay=0.0), [[gradient]])
        direction = newton_schulz(gradient.bfloat16()).float()
        expected = weight.detach() / -(0.2 * max(shape) ** 0.5)
        torch.testing.assert_close(direction, expected, rtol=2**-7, atol=2**-9)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_in_fp32_it_moves_singular_values(self, shape: tuple[int, ...]) -> None:
        """The same singular vectors, with values of 0.68 to 1.21, by the polynomial in fp64."""
        matrix = gaussian(*shape)
        u, values, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
        values = values / values.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        assert values.max() <= 1.2025
        torch.testing.assert_close(newton_schulz(matrix).double(), u @ values.diag() @ vh, rtol=1e-4, atol=1e-5)

    def test_each_matrix_of_a_stack_by_itself(self) -> None:
        stack = torch.stack([gaussian(48, 32, seed=seed) * 10.0**seed for seed in range(3)])
        alone = torch.stack([newton_schulz(matrix) for matrix in stack])
        torch.testing.assert_close(newton_schulz(stack), alone, rtol=1e-5, atol=1e-6)

    def test_a_matrix_of_zeros_stays(self) -> None:
        assert torch.equal(newton_schulz(torch.zeros(32, 16)), torch.zeros(32, 16))

    def test_no_element_exceeds_the_bound(self) -> None:
        """A diagonal has its singular values as elements; the polynomial peaks at 0.5545."""
        for ratio in torch.linspace(0.0, 1.0, 500).tolist():
            matrix = torch.diag(torch.tensor([ratio, (1 - ratio**2) ** 0.5]))
            assert float(newton_schulz(matrix).abs().amax()) < 1.2026
            assert float(newton_schulz(matrix.bfloat16()).abs().amax()) < LARGEST_ELEMENT


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("momentum", [0.95, 0.0])
def test_fp32_is_torchs(decay: float, momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its products in fp32 as well, torch.optim.Muon moves weights by the same numbers, to the rounding of fp32."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda tensor: tensor.clone())
    options = {"lr": 2e-3, "momentum": momentum, "weight_decay": decay}
    ours, theirs = ([nn.Parameter(gaussian(*shape)) for shape in SHAPES] for _ in range(2))
    gradients = [[gaussian(*shape, seed=seed) for shape in SHAPES] for seed in range(1, 7)]
    step_through(ours, LowBitMuon(ours, MuonHyperparameters(**options, **FP32)), gradients)
    step_through(theirs, torchs_muon(theirs, **options), gradients)
    for mine, other, shape in zip(ours, theirs, SHAPES, strict=True):
        assert not torch.allclose(mine, gaussian(*shape), atol=1e-3)
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_other_groups_are_adamws() -> None:
    """To the bit, with its betas, eps and decay, next to a group of matrices."""
    plain, matrix, reference = nn.Parameter(gaussian(100)), nn.Parameter(gaussian(32, 32)), nn.Parameter(gaussian(100))
    options = {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    groups = [{"params": [matrix]}, {"params": [plain], "use_muon": False}]
    optimizer = LowBitMuon(groups, MuonHyperparameters(**options, **FP32))
    gradients = [gaussian(100, seed=seed) for seed in range(1, 7)]
    step_through([matrix, plain], optimizer, [[gaussian(32, 32, seed=5), gradient] for gradient in gradients])
    step_through([reference], torch.optim.AdamW([reference], **options), [[gradient] for gradient in gradients])
    torch.testing.assert_close(plain, reference, rtol=1e-5, atol=1e-7)
    assert set(optimizer.state[plain]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(optimizer.state[matrix]) == {"step", "exp_avg"}


def test_maximize_climbs() -> None:
    first, second = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64, 64))
    gradient = gaussian(64, 64)
    step_through([first], LowBitMuon([first], MuonHyperparameters(maximize=True)), [[gradient]])
    step_through([second], LowBitMuon([second], MuonHyperparameters()), [[gradient]])
    assert torch.equal(first, -second)
    assert float((first.detach() * gradient).sum()) > 0


@pytest.mark.parametrize("codec", OrthogonalizedMomentum.state_codecs["exp_avg"])
def test_every_codec_follows_fp32(codec: str) -> None:
    base, wide, few = gaussian(64, 128), nn.Parameter(torch.zeros(64, 128)), nn.Parameter(torch.zeros(64, 128))
    gradients = [[base + 0.3 * gaussian(64, 128, seed=seed)] for seed in range(1, 20)]
    step_through([wide], LowBitMuon([wide], MuonHyperparameters(1e-3, weight_decay=0.0, **FP32)), gradients)
    optimizer = LowBitMuon([few], MuonHyperparameters(1e-3, weight_decay=0.0, exp_avg_codec=codec))
    step_through([few], optimizer, gradients)
    assert relative_error(few.detach(), wide.detach()) < 0.05
    assert optimizer.held(few).codecs == (codec,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_stored_weight_never_saturates(kind: str, decay: float) -> None:
    """Its scale comes from the bound on the step; a gradient with one entry makes the largest step that there is."""
    lone = torch.zeros(32, 256)
    lone[3, 5] = 1.0
    weight, wide = stored_weight(torch.zeros(32, 256), kind), nn.Parameter(torch.zeros(32, 256))
    defaults = MuonHyperparameters(0.02, weight_decay=decay, **FP32)
    optimizer, reference = LowBitMuon([weight], defaults), LowBitMuon([wide], defaults)
    for seed in range(12):
        gradient = lone if seed % 2 else gaussian(32, 256, seed=seed)
        step_through([weight], optimizer, [[gradient]])
        step_through([wide], reference, [[gradient]])
        largest = float(wide.detach().abs().amax())
        assert float(weight.values_amax) == pytest.approx(largest, rel=1e-2)
        assert largest / float(weight.dequant_scale) <= (65504 if kind == "fp16" else 448), f"step {seed} saturated"
    torch.testing.assert_close(weight.dequantize(), wide.detach(), rtol=5e-3, atol=1e-3)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    weight = nn.Parameter(gaussian(64, 64))
    optimizer = LowBitMuon([weight])
    step_through([weight], optimizer, [[gaussian(64, 64, seed=1)]])
    before = weight.detach().clone(), copy.deepcopy(optimizer.state[weight])
    step_through([weight], optimizer, [[torch.full((64, 64), torch.nan)]])
    assert torch.equal(weight, before[0])
    assert int(optimizer.state[weight]["step"]) == before[1]["step"] == 1
    assert optimizer.num_skipped_steps == 1


class Network(nn.Module):
    """An embedding that the head is tied to, or not, a norm, and two linear layers."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(96, 64)
        self.up, self.norm, self.down = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64)
        self.lm_head = nn.Linear(64, 96, bias=False)
        if is_tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        return self.lm_head(hidden + self.down(torch.relu(self.norm(self.up(hidden)))))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(0, 96, (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), (tokens * 7 + 3) % 96)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("is_tied", [False, True])
def test_groups_of_a_model(is_tied: bool) -> None:
    model = Network(is_tied=is_tied)
    matrices, others = muon_groups(model)
    assert [id(each) for each in matrices["params"]] == [id(model.up.weight), id(model.down.weight)]
    assert len(others["params"]) == len(list(model.parameters())) - 2
    assert (matrices["use_muon"], others["use_muon"]) == (True, False)


@pytest.mark.parametrize("level", ["O2", "O3-split-8bit"])
def test_the_length_of_runs_changes_no_bit(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On accelerators runs are as long as most matrices: each op of a run is a launch there."""
    found = []
    for length in (128, 1 << 15):
        monkeypatch.setattr(walker, "RUN_LENGTH", length)
        model = Network()
        made = initialize(model, LowBitMuon(muon_groups(model), MuonHyperparameters(1e-2)), opt_level=level, seed=3)
        assert made[1] is not None
        train(made[0], made[1], range(3))
        found.append({name: value.clone() for name, value in made[0].state_dict().items()})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("level", ["fp16-amp", *spread(level for level in LEVELS if level != "fp16-amp")])
def test_trains_and_resumes_at_every_level(level: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Network()
        groups = muon_groups(model)
        made = initialize(model, LowBitMuon(groups, MuonHyperparameters(1e-2)), opt_level=level, seed=3)
        assert made[1] is not None
        return made[0], made[1]

    model, optimizer = make()
    assert isinstance(optimizer, LowBitMuon)
    losses = train(model, optimizer, range(20))
    assert losses[-1] < 0.8 * losses[0]
    hidden = model.get_parameter("up.weight")
    assert optimizer.held(hidden).codecs == (LEVELS[level].exp_avg,)
    held, others = memory_report(model, optimizer), model.get_parameter("embedding.weight").numel() * 2
    assert held["exp_avg"] > held["exp_avg_sq"] > 0
    assert held["exp_avg_sq"] < 4 * others + 4096

    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, range(20, 23))
    model, optimizer = make()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert train(model, optimizer, range(20, 23)) == expected


def test_by_name() -> None:
    model, optimizer = initialize(Network(), opt_level="O2", optimizer_name="muon")
    assert isinstance(optimizer, LowBitMuon)
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    losses = train(model, optimizer, range(30))
    assert losses[-1] < losses[0]


class TestRefusals:
    @pytest.mark.parametrize("shape", [(64,), (8, 3, 4, 4)])
    def test_what_is_no_matrix(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"is in a group with use_muon; allowed: matrices .*muon_groups\(model\)"):
            LowBitMuon([nn.Parameter(torch.zeros(shape))])

    def test_states_of_the_other_rule(self) -> None:
        matrix = nn.Parameter(gaussian(64, 64))
        adamw = LowBitMuon([{"params": [matrix], "use_muon": False}])
        step_through([matrix], adamw, [[gaussian(64, 64)]])
        with pytest.raises(ValueError, match="the saved states are exp_avg, exp_avg_sq; allowed: exp_avg, the states of muon"):
            LowBitMuon([matrix]).load_state_dict(adamw.state_dict())

    def test_a_momentum_of_1(self) -> None:
        with pytest.raises(ValueError, match=r"momentum is 1.0; allowed: from 0 up to, not including, 1"):
            LowBitMuon([nn.Parameter(torch.zeros(8, 8))], MuonHyperparameters(momentum=1.0))
