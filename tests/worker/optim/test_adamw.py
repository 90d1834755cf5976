"""LowBitAdamW against torch's own Adam and AdamW, and what an ordinary training loop does to an optimizer."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas.levels import LEVELS
from octet.worker import kernels
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.fp8.weight import hold_encoded
from octet.worker.fp8.weights import encode_values
from octet.worker.optim import Hyperparameters, LowBitAdamW, adopt
from octet.worker.optim.codecs import CODECS

TORCH = {True: torch.optim.AdamW, False: torch.optim.Adam}
NUM_STEPS = 4


def small_model() -> nn.Sequential:
    """Two layers of 8192 weights, beyond the size below which states stay fp32, and their biases, below it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(64, 64, generator=generator), torch.randn(64, 64, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(NUM_STEPS)) -> Tensor:
    for step in steps:
        inputs, targets = batch(step)
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def low_bit(model: nn.Module, **options: Any) -> LowBitAdamW:
    return LowBitAdamW(model.parameters(), Hyperparameters(**options))


class TestAgainstTorch:
    @pytest.mark.parametrize(("exp_avg_codec", "exp_avg_sq_codec"), list(product(*LowBitAdamW.rule.state_codecs.values())))
    def test_every_pair_of_state_codecs(self, exp_avg_codec: str, exp_avg_sq_codec: str) -> None:
        decoupled = exp_avg_sq_codec != "fp16-block"  # each kind of decay with every codec of exp_avg
        model, reference = small_model(), small_model()
        expected = train(reference, TORCH[decoupled](reference.parameters(), lr=1e-3, weight_decay=0.1))
        optimizer = low_bit(
            model,
            weight_decay=0.1,
            decoupled_weight_decay=decoupled,
            exp_avg_codec=exp_avg_codec,
            exp_avg_sq_codec=exp_avg_sq_codec,
        )
        torch.testing.assert_close(train(model, optimizer), expected, rtol=0, atol=3e-4)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"maximize": True},
            {"betas": (0.5, 0.7), "eps": 1e-3},
            {"weight_decay": 0.0},
            {"lr": torch.tensor(2e-3), "weight_decay": 0.3},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("decoupled", [True, False])
    def test_fp32_states_are_torchs_to_the_last_bits(self, options: dict[str, Any], decoupled: bool) -> None:
        model, reference = small_model(), small_model()
        expected = train(reference, TORCH[decoupled](reference.parameters(), **({"weight_decay": 1e-2} | options)))
        fp32 = {"exp_avg_codec": "fp32", "exp_avg_sq_codec": "fp32"}
        actual = train(model, low_bit(model, decoupled_weight_decay=decoupled, **fp32, **options))
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=2e-6)

    def test_groups_schedulers_and_closures(self) -> None:
        model, reference = small_model(), small_model()

        def run(network: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> Tensor:
            optimizer = make(
                [{"params": network[0].parameters(), "lr": 1e-3}, {"params": network[2].parameters(), "weight_decay": 0.5}]
            )
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS)
            for step in range(NUM_STEPS):

                def closure(step: int = step) -> Tensor:
                    inputs, targets = batch(step)
                    optimizer.zero_grad()
                    loss = (network(inputs) - targets).square().mean()
                    loss.backward()
                    return loss

                assert optimizer.step(closure).item() > 0
                scheduler.step()
            return weights(network)

        fp32 = Hyperparameters(exp_avg_codec="fp32", exp_avg_sq_codec="fp32")
        actual = run(model, lambda groups: LowBitAdamW(groups, fp32))
        torch.testing.assert_close(actual, run(reference, torch.optim.AdamW), rtol=1e-6, atol=2e-6)

    def test_strides_do_not_matter(self) -> None:
        """A weight, or a gradient, whose memory is laid out another way."""
        plain, transposed = nn.Parameter(torch.randn(96, 64)), nn.Parameter(torch.empty(64, 96).t())
        transposed.data.copy_(plain.data)
        assert not transposed.is_contiguous()
        gradient = torch.randn(64, 96).t()
        for parameter in (plain, transposed):
            parameter.grad = gradient
            LowBitAdamW([parameter]).step()
        assert torch.equal(plain, transposed)

    def test_gradients_are_left_alone(self) -> None:
        for options in ({"maximize": True}, {"decoupled_weight_decay": False}):
            parameter = nn.Parameter(torch.randn(5000))
            parameter.grad = gradient = torch.randn(5000)
            before = gradient.clone()
            LowBitAdamW([parameter], Hyperparameters(**options)).step()
            assert torch.equal(gradient, before)

    def test_small_tensors_keep_fp32_states(self) -> None:
        optimizer = low_bit(small_model())
        dtypes = {p.numel(): optimizer.state[p]["exp_avg"]["codes"].dtype for p in optimizer.param_groups[0]["params"]}
        assert dtypes == {8192: torch.float8_e4m3fn, 128: torch.float32, 64: torch.float32}

    def test_parameters_without_a_gradient_rest(self) -> None:
        model = small_model()
        model[2].requires_grad_(False)
        before = model[2].weight.clone()
        optimizer = low_bit(model)
        train(model, optimizer)
        assert torch.equal(model[2].weight, before)
        model[2].requires_grad_(True)  # thawed later
        train(model, optimizer)
        assert not torch.equal(model[2].weight, before)


@pytest.mark.parametrize(
    ("exp_avg_codec", "exp_avg_sq_codec"),
    [("fp8-dre", "fp16-block"), ("int8-companded", "uint8-companded"), ("fp32", "fp32")],
)
class TestResume:
    def test_is_bit_equal_after_one_step(self, exp_avg_codec: str, exp_avg_sq_codec: str) -> None:
        codecs = {"exp_avg_codec": exp_avg_codec, "exp_avg_sq_codec": exp_avg_sq_codec}
        model = small_model()
        optimizer = LowBitAdamW(model.parameters(), Hyperparameters(**codecs), seed=5)
        train(model, optimizer, range(1))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        expected = train(model, optimizer, range(1, 4))
        resumed_model = small_model()
        resumed = LowBitAdamW(resumed_model.parameters(), Hyperparameters(**codecs), seed=0)
        resumed_model.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        assert torch.equal(train(resumed_model, resumed, range(1, 4)), expected)

    def test_a_copy_continues_by_itself(self, exp_avg_codec: str, exp_avg_sq_codec: str) -> None:
        model = small_model()
        optimizer = low_bit(model, exp_avg_codec=exp_avg_codec, exp_avg_sq_codec=exp_avg_sq_codec)
        train(model, optimizer, range(1))
        twin_model, twin = copy.deepcopy((model, optimizer))
        expected = train(model, optimizer, range(1, 3))
        assert torch.equal(train(twin_model, twin, range(1, 3)), expected)


class TestLoading:
    def test_states_of_another_codec_are_encoded_again(self) -> None:
        model = small_model()
        optimizer = low_bit(model, exp_avg_codec="fp32", exp_avg_sq_codec="fp32")
        train(model, optimizer)
        other = low_bit(model, exp_avg_codec="int8-companded")
        other.load_state_dict(optimizer.state_dict())
        weight = model[0].weight
        assert other.state[weight]["step"] == NUM_STEPS
        assert other.state[weight]["exp_avg"]["codes"].dtype == torch.int8
        assert other.param_groups[0]["exp_avg_codec"] == "int8-companded"

        decoded = CODECS["int8-companded"].decode(other.state[weight]["exp_avg"])
        expected = optimizer.state[weight]["exp_avg"]["codes"]
        assert float((decoded - expected).norm() / expected.norm()) < 0.02

    def test_adopts_a_torch_optimizer_with_its_states(self) -> None:
        for optimizer_class, decoupled in ((torch.optim.AdamW, True), (torch.optim.Adam, False)):
            model, reference = small_model(), small_model()
            first, second = (optimizer_class(m.parameters(), lr=2e-3, weight_decay=0.1) for m in (model, reference))
            train(model, first, range(2)), train(reference, second, range(2))
            adopted = adopt(first, LEVELS["fp32"])
            assert adopted.param_groups[0]["decoupled_weight_decay"] is decoupled
            actual, expected = train(model, adopted, range(2, 5)), train(reference, second, range(2, 5))
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=2e-6)

    def test_does_not_share_memory_with_what_was_loaded(self) -> None:
        model = small_model()
        optimizer = low_bit(model)
        train(model, optimizer)
        saved = optimizer.state_dict()
        other = low_bit(model)
        other.load_state_dict(saved)
        before = copy.deepcopy(saved["state"][0]["exp_avg"]["codes"].view(torch.uint8))
        train(model, other)
        assert torch.equal(saved["state"][0]["exp_avg"]["codes"].view(torch.uint8), before)

    def test_a_master_weight_that_was_not_saved_stays(self) -> None:
        """A torch optimizer has none: the master keeps the digits that its E4M3 weight lost."""
        values, wide = torch.randn(64, 128), nn.Parameter(torch.randn(64, 128))
        torch_optimizer = torch.optim.AdamW([wide])
        wide.grad = torch.ones(64, 128)
        torch_optimizer.step()
        hold_encoded(wide, encode_values(values, torch.float8_e4m3fn))
        wide.state.wide, wide.state.is_assigned = values, True
        master = adopt(torch_optimizer, LEVELS["O3"]).state[wide]["master_weights"]
        decoded = kernels.dequantize(master["codes"], master["dequant_scale"]).view(64, 128)
        assert float((decoded - values).norm() / values.norm()) < 3e-4

    def test_a_state_in_another_versions_parts_is_refused(self) -> None:
        model = small_model()
        optimizer = low_bit(model)
        train(model, optimizer)
        saved = optimizer.state_dict()
        parts = next(state["exp_avg"] for state in saved["state"].values() if "steps" in state["exp_avg"])
        parts["levels"] = parts.pop("steps")
        with pytest.raises(ValueError, match=r"exp_avg consists of .*levels; allowed: .*steps"):
            low_bit(model).load_state_dict(saved)


class TestNonFiniteGradients:
    def poisoned(self, value: float) -> tuple[nn.Module, LowBitAdamW]:
        model = small_model()
        optimizer = low_bit(model)
        train(model, optimizer)
        model[2].bias.grad[3] = value
        return model, optimizer

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_the_step_changes_nothing_and_is_counted(self, value: float) -> None:
        model, optimizer = self.poisoned(value)
        before = copy.deepcopy((weights(model), optimizer.state_dict()["state"]))
        optimizer.step()
        assert optimizer.num_skipped_steps == 1
        assert torch.equal(weights(model), before[0])
        assert optimizer.state_dict()["state"][0]["step"] == before[1][0]["step"]
        assert optimizer.state_dict()["num_skipped_steps"] == 1

    def test_fp8_gradients(self) -> None:
        parameter = nn.Parameter(torch.randn(64, 128))
        optimizer = LowBitAdamW([parameter])
        for bad in (torch.nan, torch.inf):
            gradient = torch.randn(64, 128)
            gradient[3, 4] = bad
            parameter.grad = Float8Gradient.quantize(gradient, RoundingPosition(0, 0))
            optimizer.step()
        parameter.grad = Float8Gradient.quantize(torch.randn(64, 128), RoundingPosition(0, 0)).mul_(torch.inf)  # clipped by Inf
        optimizer.step()
        assert optimizer.num_skipped_steps == 3

    def test_all_ranks_decide_together(self) -> None:
        asked: list[bool] = []

        def other_rank_is_not_finite(finite: Tensor) -> Tensor:
            asked.append(bool(finite))
            return torch.zeros_like(finite)

        model = small_model()
        optimizer = LowBitAdamW(model.parameters(), all_ranks_finite=other_rank_is_not_finite)
        before = weights(model)
        assert torch.equal(train(model, optimizer, range(1)), before)
        assert asked == [True]
        assert optimizer.num_skipped_steps == 1


class TestGradientFormats:
    def test_fp8(self) -> None:
        """Codes are decoded run by run, with one scale."""
        gradient = torch.randn(300, 200) * torch.logspace(-2, 2, 300).unsqueeze(1)
        codes, dequant_scale = kernels.quantize(gradient.flatten(), torch.float8_e4m3fn)
        fp8, wide = nn.Parameter(torch.zeros(300, 200)), nn.Parameter(torch.zeros(300, 200))
        fp8.grad = Float8Gradient(codes.view(300, 200), dequant_scale, RoundingPosition(0, 0))
        wide.grad = kernels.dequantize(codes, dequant_scale).view(300, 200)
        for parameter in (fp8, wide):
            LowBitAdamW([parameter]).step()
        assert torch.equal(fp8, wide)

    def test_sparse_is_refused(self) -> None:
        embedding = nn.Embedding(100, 64, sparse=True)
        embedding(torch.tensor([3])).sum().backward()
        with pytest.raises(ValueError, match="sparse; allowed: dense"):
            LowBitAdamW(embedding.parameters()).step()


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"lr": -1.0}, "lr is -1.0; allowed: at least 0"),
            ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\)"),
            ({"eps": -1e-8}, "eps is"),
            ({"weight_decay": -0.1}, "weight_decay is -0.1"),
            ({"exp_avg_codec": "fp4"}, "exp_avg_codec is 'fp4'; allowed: fp32, fp16-block, fp8-dre, int8-companded"),
            ({"exp_avg_codec": "uint8-companded"}, "exp_avg_codec is 'uint8-companded'"),
            ({"exp_avg_sq_codec": "fp8-dre"}, "exp_avg_sq_codec is 'fp8-dre'; allowed: fp32, fp16-block, uint8-companded"),
        ],
    )
    def test_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            low_bit(small_model(), **options)

    def test_codes_that_nobody_explained(self) -> None:
        with pytest.raises(ValueError, match=r"dtype torch\.float8_e4m3fn; allowed: torch\.float32, torch\.bfloat16"):
            LowBitAdamW([nn.Parameter(torch.zeros(16, 16).to(torch.float8_e4m3fn))])

    def test_optimizers_that_cannot_be_represented_by_name(self) -> None:
        model = small_model()
        allowed = "torch.optim.AdamW, torch.optim.Adam, octet.worker.optim.LowBitAdamW, octet.worker.optim.LowBitLion, "
        allowed += "octet.worker.optim.LowBitMuon, octet.worker.optim.LowBitSGD"
        with pytest.raises(ValueError, match=rf"SGD cannot hold .* allowed: {allowed}\."):
            adopt(torch.optim.SGD(model.parameters(), lr=0.1), LEVELS["fp32"])
        with pytest.raises(ValueError, match="amsgrad=True is not supported"):
            adopt(torch.optim.AdamW(model.parameters(), amsgrad=True), LEVELS["O2"])


@pytest.mark.parametrize("codecs", [("int8-companded", "uint8-companded"), ("fp8-dre", "fp16-block"), ("fp32", "fp32")])
@pytest.mark.parametrize(("betas", "largest"), [((0.9, 0.999), 9.2), ((0.9, 0.95), 3.7)])
def test_no_update_exceeds_what_exact_moments_allow(
    codecs: tuple[str, str], betas: tuple[float, float], largest: float
) -> None:
    """In a block that spans 1 to 1e-6 an 8-bit second moment rounds to 0 where the first survives: the quotient was 30,000."""
    scales = torch.logspace(0, -6, 64)
    parameter = nn.Parameter(torch.zeros(64, 64))
    options = Hyperparameters(lr=1e-3, betas=betas, weight_decay=0.0, exp_avg_codec=codecs[0], exp_avg_sq_codec=codecs[1])
    optimizer = LowBitAdamW([parameter], options)
    generator = torch.Generator().manual_seed(0)
    updates = []
    for _ in range(60):
        parameter.grad = torch.randn(64, 64, generator=generator) * scales * 1000
        before = parameter.detach().clone()
        optimizer.step()
        updates.append(((parameter.detach() - before) / 1e-3).abs().max())
    assert updates[0] <= 1.25 * 1.001, "the first update is lr, and the slack for rounding"
    assert max(updates) <= largest


def test_hyperparameters_of_a_wrapper_are_refused_with_what_to_do() -> None:
    """torch's ZeroRedundancyOptimizer passes them on."""
    with pytest.raises(TypeError, match=r"LowBitAdamW got lr=0.1; allowed: .* Hyperparameters\(lr=0.1\).*zero_stage=1"):
        LowBitAdamW([torch.nn.Parameter(torch.ones(4))], lr=0.1)  # type: ignore[call-arg]
