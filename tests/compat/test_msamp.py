"""MS-AMP's names over `octet.initialize`: the same arguments, defaults and refusals, and its programs as they stand.

The programs in `scripts/` have the structure of MS-AMP's examples, and pictures that are made in the place of downloads.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import octet.compat.msamp as msamp
from octet.compat.msamp import __main__ as runner
from octet.worker import memory_report
from tests.kit.ports import free_port
from tests.kit.waiting import LONG_S

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
Run = Callable[..., dict[str, str]]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))


@pytest.mark.parametrize(("level", "expected"), [(None, "O1"), ("O1", "O1"), ("O2", "O2"), ("O3", "O3")])
def test_each_level_is_octets_own(level: str | None, expected: str) -> None:
    model = network()
    arguments = () if level is None else (level,)
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), *arguments)
    before = model(torch.ones(4, 64)).square().mean()
    before.backward()
    optimizer.step()
    assert model.octet_report.level == expected
    assert model.octet_report.converted == ("0", "2")
    assert model(torch.ones(4, 64)).square().mean() < before


def test_the_bits_are_those_of_octets_initialize() -> None:
    """A last layer by the name of a head is converted too, as MS-AMP does."""
    from octet import initialize

    def trained(kind: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential()
        model.add_module("body", nn.Linear(64, 64))
        model.add_module("head", nn.Linear(64, 32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if kind == "msamp":
            model, optimizer = msamp.initialize(model, optimizer, opt_level="O2")
        else:
            model, optimizer = initialize(model, optimizer, "O2", convert_heads=True)
        for _ in range(3):
            model(torch.ones(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([value.float().flatten() for value in model.state_dict().values()])

    assert torch.equal(trained("msamp"), trained("octet"))


def test_without_an_optimizer_it_is_torchs_adamw_with_its_defaults() -> None:
    model, optimizer = msamp.initialize(network())
    ours, torchs = optimizer.param_groups[0], torch.optim.AdamW(network().parameters()).param_groups[0]
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert {name: ours[name] for name in ("lr", "betas", "eps", "weight_decay")} == {
        name: torchs[name] for name in ("lr", "betas", "eps", "weight_decay")
    }
    assert ours["params"] == list(model.parameters())


def test_o2_holds_fewer_bytes_of_states_than_o1() -> None:
    o1, o2 = (memory_report(*msamp.initialize(network(), None, level)) for level in ("O1", "O2"))
    assert o1["weights"] == o2["weights"]
    assert o2["exp_avg"] < 0.4 * o1["exp_avg"]
    assert o2["exp_avg_sq"] < 0.6 * o1["exp_avg_sq"]


def test_use_te_scales_with_transformer_engines_history() -> None:
    plain, with_te = (msamp.initialize(network(), None, "O2", use_te)[0] for use_te in (False, True))
    assert "tensor scales, current" in str(plain[0].recipe)
    assert "tensor scales, delayed over 1024 steps" in str(with_te[0].recipe)
    assert with_te.octet_report.level == "O2"


def test_a_layer_that_is_marked_stays_as_it_is() -> None:
    model = network()
    model[2].use_fp32_linear = True
    model, _ = msamp.initialize(model, None, "O2")
    assert model.octet_report.converted == ("0",)
    assert [layer.name for layer in model.octet_report.skipped] == ["2"]


def test_what_cannot_be_is_refused_with_what_to_change() -> None:
    with pytest.raises(ValueError, match=r"opt_level is '02'; allowed: O1, O2, O3\. Change it\. Did you mean 'O2'"):
        msamp.initialize(network(), None, "02")
    with pytest.raises(TypeError, match="model: got str"):
        msamp.initialize("model")  # type: ignore[arg-type]
    of_te = type("LayerNormLinear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.module.layernorm_linear"})
    with pytest.raises(ValueError, match=r"use_te is True and 1 is a LayerNormLinear of transformer_engine"):
        msamp.initialize(nn.Sequential(nn.Linear(16, 16), of_te(16, 16)), None, "O2", use_te=True)


@pytest.mark.parametrize("name", sorted(msamp.NOT_BUILT))
def test_another_name_of_ms_amp_says_what_takes_its_place(name: str) -> None:
    with pytest.raises(ImportError, match=rf"msamp\.{name} is not built in octet\.compat\.msamp: (call|give|use|a) "):
        exec(f"from octet.compat.msamp import {name}")
    assert not hasattr(msamp, "no_such_name")


def test_clipping_is_torchs_and_clips_nothing_at_0() -> None:
    def norms(max_norm: float) -> tuple[float, float]:
        model, _ = msamp.initialize(network(), None, "O2")
        model(torch.ones(4, 64)).sum().backward()
        before = msamp.clip_grad_norm_(model.parameters(), max_norm)
        return float(before), float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))

    before, after = norms(1.0)
    assert before > 2.0
    assert after == pytest.approx(1.0, rel=1e-3)
    assert norms(0.0) == pytest.approx((before, before), rel=1e-6)
    model = network()
    model(torch.full((4, 64), float("inf"))).sum().backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        msamp.clip_grad_norm_(model.parameters(), 0.0, error_if_nonfinite=True)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run a program in this process, as `python -m octet.compat.msamp` does; returns the printed values by their names."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    monkeypatch.setattr(sys, "argv", [])

    def forget() -> None:
        for name in ("msamp", "digits"):
            sys.modules.pop(name, None)

    def run_program(*arguments: str) -> dict[str, str]:
        forget()
        runner.main(list(arguments))
        words = [line.removeprefix("rank 0 ").split() for line in capsys.readouterr().out.splitlines()]
        return {line[index]: line[index + 1] for line in words for index in range(0, len(line) - 1, 2)}

    yield run_program
    forget()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_its_mnist_example_runs_as_it_stands(run: Run, level: str, tmp_path: Path) -> None:
    """A scaler, autocast, a schedule, and a model that is saved as values."""
    program, saved = str(SCRIPTS / "mnist.py"), tmp_path / "model.pt"
    plain = run(program)
    trained = run(program, "--enable-msamp", "--opt-level", level, "--save-model", str(saved))
    assert trained["optimizer"] == "LowBitAdamW"
    assert trained["weight"] == "Float8Weight"
    assert trained["scale"] == plain["scale"] == "65536"
    assert float(trained["accuracy"]) >= float(plain["accuracy"]) - 0.02 > 0.9
    assert float(trained["loss"]) == pytest.approx(float(plain["loss"]), abs=0.05)
    assert trained["loss"] != plain["loss"]
    assert {value.dtype for value in torch.load(saved).values()} == {torch.float32}


@pytest.mark.system
def test_its_imagenet_example_runs_as_it_stands(run: Run) -> None:
    """A head that stays as it is, groups of parameters, accumulation, and msamp's own clipping of unscaled gradients."""
    program = str(SCRIPTS / "imagenet.py")
    plain, trained = run(program), run(program, "--enable-msamp", "--msamp-opt-level", "O2")
    assert trained["head"] == "HalfNNLinear"
    assert float(trained["accuracy"]) >= float(plain["accuracy"]) - 0.02 > 0.7
    assert float(trained["norm"]) == pytest.approx(float(plain["norm"]), rel=0.1)


@pytest.mark.system
def test_ranks_under_torchs_ddp_train_one_model() -> None:
    """MS-AMP's examples start so. There `import msamp` changes DDP; here DDP is torch's own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    program = [str(SCRIPTS / "imagenet.py"), "--enable-msamp", "--msamp-opt-level", "O2"]
    command = [*torchrun, "-m", "octet.compat.msamp", *program]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=LONG_S)
    assert found.returncode == 0, found.stderr
    lines = sorted(line for line in found.stdout.splitlines() if "weights" in line)
    first, second = (line.split(" ", 2)[2] for line in lines)
    assert first == second


def test_a_program_that_cannot_start_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            runner.main(list(arguments))
        return capsys.readouterr().err

    assert refused() == f"{runner.USAGE}\n"
    assert refused("no.py").startswith("no file no.py. usage:")
    (tmp_path / "msamp.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert refused(str(SCRIPTS / "mnist.py")).startswith("msamp is installed here, and the program could mean either one")


def test_a_module_runs_by_its_name(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a_module_of_msamp.py").write_text("import sys, msamp\nprint('levels', len(msamp.opt_levels), *sys.argv[1:])\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run("-m", "a_module_of_msamp", "given", "word") == {"levels": "3", "given": "word"}
