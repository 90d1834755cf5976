"""Packages around a model, on two ranks: TRL, PEFT, torch-ema, averages of timm and torch, GradScaler, clipping, memory.

Each gives what it gives on one process or in plain arithmetic, or is refused by name. Ranks are gloo's.
"""

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

from octet import carry_model_state, memory_report, parallelize, plain_state_dict
from octet.api_schemas.levels import LEVELS
from tests.kit.ports import free_port
from tests.kit.ranks import refusal_of, run_ranks, saved_by_ranks
from tests.kit.small_model import make
from tests.kit.timm_averages import model_ema
from tests.worker.integrations.bits import assert_same_bits
from tests.worker.integrations.test_resume_of_examples import CHECKED

NUM_RANKS = 2
pytestmark = [pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]  # warnings of the packages
COARSE = ("O3", "O3-split")
"""Levels whose masters or residuals ranks divide at ZeRO stage 1."""
WRAPPERS = ("zero 0", "zero 1", "ddp")
CLOSE = {"bf16": 1e-3, "fp8": 3e-3}
"""Relative distance of an untrained network's loss from fp32's on one process, by the dtype of the products."""
Values = list[Tensor]


@contextmanager
def torchrun(rank: int, port: int) -> Iterator[None]:
    """A rank's environment and process group."""
    torch.set_num_threads(1)
    names: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS}
    names |= {"MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
    os.environ.update({name: str(value) for name, value in names.items()})
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def are_same_on_ranks(tensors: Values) -> bool:
    flat = torch.cat([tensor.float().reshape(-1) for tensor in tensors])
    gathered = [torch.empty_like(flat) for _ in range(NUM_RANKS)]
    dist.all_gather(gathered, flat)
    return all(torch.equal(gathered[0], other) for other in gathered)


def error_of(found: Values, expected: Values) -> float:
    """The largest relative error of a tensor."""
    pairs = zip(found, expected, strict=True)
    return max(float((one.float() - other).norm() / other.norm().clamp(min=1e-6)) for one, other in pairs)


# TRL --------------------------------------------------------------------------------------------------------------------


def train_with_trl(rank: int, port: int, folder: str) -> None:
    from tests.worker.integrations.test_sft import dpo, sft, trainer  # loads transformers

    found: dict[str, Any] = {}
    with torchrun(rank, port):
        for make_trainer in (sft, dpo):
            for level in CHECKED:
                own = Path(folder) / f"{make_trainer.__name__}-{level}"
                whole = trainer(make_trainer, own, level)
                whole.train()
                resumed = trainer(make_trainer, own / "again", level, seed=1 + rank)
                vars(resumed.args)["_setup_devices"] = torch.device("cpu")  # see test_ranks
                resumed.train(resume_from_checkpoint=str(own / "checkpoint-2"))
                states = [(each.model.state_dict(), each.optimizer.state_dict()) for each in (whole, resumed)]
                losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
                found[f"{make_trainer.__name__} {level}"] = {"losses": losses, "states": states}
    torch.save(found, f"{folder}/{rank}.pt")


def test_trl_trains_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(train_with_trl, (free_port(), str(tmp_path)), NUM_RANKS)
    first, second = saved_by_ranks(tmp_path, NUM_RANKS)
    for name, found in first.items():
        assert found["losses"][-1] < 0.99 * found["losses"][0], name
        assert found["losses"] == pytest.approx(first[f"{name.split()[0]} bf16-amp"]["losses"], rel=2e-3)
        assert_same_bits(*found["states"])
        assert_same_bits(found["states"], second[name]["states"])


# PEFT -------------------------------------------------------------------------------------------------------------------


def adapted_on_ranks(level: str | None, order: str, wrapper: str, seed: int) -> tuple[Any, Any, torch.optim.Optimizer]:
    """A Llama with adapters, what is called to compute its loss, and the optimizer of the adapters."""
    from tests.worker.integrations.test_peft import adapted

    model = adapted(level, order, seed)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    if wrapper.startswith("zero"):
        parallelize(model, optimizer, zero_stage=int(wrapper[-1]))
    return model, DistributedDataParallel(model) if wrapper == "ddp" else model, optimizer


def train_adapters(called: Any, optimizer: torch.optim.Optimizer, ids: Tensor, num_steps: int) -> list[float]:
    losses = []
    for _ in range(num_steps):
        loss = called(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adapters_on_ranks(rank: int, level: str, order: str, wrapper: str, folder: Path) -> dict[str, Any]:
    from peft import PeftModel, set_peft_model_state_dict
    from safetensors.torch import load_file

    from tests.worker.integrations.test_peft import of_base, values
    from tests.worker.integrations.tiny import examples, llama

    ids = torch.stack([row["input_ids"] for row in examples(8)]).chunk(NUM_RANKS)[rank]
    model, called, optimizer = adapted_on_ranks(level, order, wrapper, seed=rank)  # rank 0's adapters are everybody's
    losses = train_adapters(called, optimizer, ids, 2)
    model.save_pretrained(folder / str(rank))
    states = copy.deepcopy(optimizer.state_dict())
    losses += train_adapters(called, optimizer, ids, 2)
    trained = {name: value for name, value in values(model).items() if "lora_" in name}

    again, called, its_optimizer = adapted_on_ranks(level, order, wrapper, seed=5)
    set_peft_model_state_dict(again, load_file(folder / str(rank) / "adapter_model.safetensors"))
    its_optimizer.load_state_dict(states)
    rest = train_adapters(called, its_optimizer, ids, 2)
    resumed = [value for name, value in values(again).items() if "lora_" in name]

    model.save_pretrained(folder / str(rank))
    base = of_base(model)
    plain = PeftModel.from_pretrained(llama(), folder / str(rank)).merge_and_unload()
    changes = {name: value - values(llama())[name] for name, value in values(plain).items()}
    merged = values(model.merge_and_unload())
    return {
        "losses": losses,
        "resumed": rest == losses[2:] and all(map(torch.equal, resumed, trained.values())),
        "same": are_same_on_ranks(list(trained.values())),
        "merged": error_of(list(merged.values()), [base[name] + changes[name] for name in merged]),
    }


def adapt_on_ranks(rank: int, port: int, folder: str) -> None:
    with torchrun(rank, port):
        found: dict[Any, Any] = {
            (level, order, wrapper): adapters_on_ranks(rank, level, order, wrapper, Path(folder) / f"{level}-{order}-{wrapper}")
            for level in CHECKED
            for order in ("before", "after")
            for wrapper in ("zero 0", "ddp")
        }
        found["refused"] = refusal_of(lambda: adapted_on_ranks("O2", "after", "zero 1", 0))
    torch.save(found, f"{folder}/{rank}.pt")


def test_adapters_train_resume_and_merge(tmp_path: Path) -> None:
    from tests.worker.integrations.test_peft import adapted
    from tests.worker.integrations.tiny import examples

    run_ranks(adapt_on_ranks, (free_port(), str(tmp_path)), NUM_RANKS)
    ranks = saved_by_ranks(tmp_path, NUM_RANKS)
    ids, plain = torch.stack([row["input_ids"] for row in examples(8)]), adapted(None, "before")
    alone = train_adapters(plain, torch.optim.AdamW([one for one in plain.parameters() if one.requires_grad], lr=1e-2), ids, 4)
    refusals = [found.pop("refused") for found in ranks]
    assert all("allowed: AdamW, Adam and Lion after initialize. Use one of these, or zero_stage=0" in said for said in refusals)
    for case in ranks[0]:
        mean = [(one + other) / NUM_RANKS for one, other in zip(*(found[case]["losses"] for found in ranks), strict=True)]
        assert mean == pytest.approx(alone, rel=CLOSE[LEVELS[case[0]].gemm]), case
        for found in ranks:
            assert found[case]["resumed"], case
            assert found[case]["same"], case
            assert found[case]["merged"] < 1e-6, case


# Averages, GradScaler, clipping, memory reports -----------------------------------------------------------------------


class Run:
    """A small model in training on this rank."""

    def __init__(self, level: str, wrapper: str, seed: int = 0, accelerator: Any = None) -> None:
        """accelerator: gets the model, which it moves, before ranks divide it."""
        self.model, self.optimizer = make(level, seed=seed)
        if accelerator is not None:
            accelerator.prepare_model(self.model, evaluation_mode=True)
        self.called: Any = self.model
        self.parallel = None
        if wrapper == "ddp":
            self.called = DistributedDataParallel(self.model)
        else:
            self.parallel = parallelize(self.model, self.optimizer, zero_stage=int(wrapper[-1]))

    def loss(self, step: int) -> Tensor:
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(step)).chunk(NUM_RANKS)[dist.get_rank()]
        return self.called(x).float().square().mean()

    def step(self, step: int) -> None:
        self.loss(step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self, limit: float) -> Tensor:
        if self.parallel is not None:
            return self.parallel.clip_grad_norm_(limit)
        return nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def values(self) -> Values:
        """All digits."""
        state = plain_state_dict(self.model)
        return [state[name].clone() for name, _ in self.model.named_parameters()]


def averaged_by_torch_ema(level: str, wrapper: str) -> dict[str, Any]:
    """Compare with an average of all digits by hand; save it with the run, and go on from both."""
    from torch_ema import ExponentialMovingAverage

    run = Run(level, wrapper)
    average, by_hand = ExponentialMovingAverage(run.model.parameters(), decay=0.9), run.values()
    for step in range(4):
        run.step(step)
        average.update()
        decay = min(0.9, (2 + step) / (11 + step))
        by_hand = [mean - (1 - decay) * (mean - value) for mean, value in zip(by_hand, run.values(), strict=True)]
    before = run.values()
    states = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "average": average.state_dict()}
    with average.average_parameters():
        found = {"average": error_of(run.values(), by_hand), "same": are_same_on_ranks(run.values())}
    found["restored"] = error_of(run.values(), before)

    again = Run(level, wrapper, seed=1)
    its_average = ExponentialMovingAverage(again.model.parameters(), decay=0.9)
    again.model.load_state_dict(states["model"])
    again.optimizer.load_state_dict(states["optimizer"])
    its_average.load_state_dict(states["average"])
    with its_average.average_parameters():
        found["loaded"] = error_of(again.values(), by_hand)
    return found


def averaged_by_torch(level: str, wrapper: str) -> dict[str, Any]:
    run = Run(level, wrapper)
    average, total = swa_utils.AveragedModel(run.model), [torch.zeros(()) for _ in run.model.parameters()]
    for step in range(4):
        run.step(step)
        average.update_parameters(run.model)
        total = [one + value for one, value in zip(total, run.values(), strict=True)]
    mean = [parameter.detach() + 0 for parameter in average.module.parameters()]
    return {"average": error_of(mean, [one / 4 for one in total]), "same": are_same_on_ranks(mean)}


def averaged_by_timm(level: str, wrapper: str) -> dict[str, Any]:
    """ModelEmaV3 against an average of all digits by hand, and saved and loaded."""
    run, again = Run(level, wrapper), Run(level, wrapper, seed=1)
    average, loaded = (model_ema().ModelEmaV3(each.model, decay=0.9) for each in (run, again))
    by_hand = run.values()
    for step in range(4):
        run.step(step)
        average.update(run.model)
        by_hand = [mean + 0.1 * (value - mean) for mean, value in zip(by_hand, run.values(), strict=True)]
    mean = [parameter.detach() + 0 for parameter in average.module.parameters()]
    loaded.load_state_dict(average.state_dict())
    restored = [parameter.detach() + 0 for parameter in loaded.module.parameters()]
    return {"average": error_of(mean, by_hand), "loaded": error_of(restored, mean), "same": are_same_on_ranks(mean)}


def scaled_and_clipped(level: str, wrapper: str) -> dict[str, Any]:
    """Three steps with and without a loss scale; and one whose loss is infinite on the last rank alone."""
    runs = []
    for is_enabled in (False, True):
        run, scaler = Run(level, wrapper), torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_enabled)
        norms = []
        for step in range(3):
            scaler.scale(run.loss(step)).backward()
            scaler.unscale_(run.optimizer)
            norms.append(float(run.clip(0.05)))
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
        runs.append((norms, run.values()))
    before = run.values()
    factor = torch.inf if dist.get_rank() == NUM_RANKS - 1 else 1.0
    scaler.scale(run.loss(3) * factor).backward()
    scaler.step(run.optimizer)
    scaler.update()
    return {
        "norms": runs[0][0],
        "is the same": runs[0][0] == runs[1][0] and all(map(torch.equal, runs[0][1], runs[1][1])),
        "same": are_same_on_ranks(runs[1][1]),
        "is skipped": all(map(torch.equal, run.values(), before)) and scaler.get_scale() == 512.0,
    }


def clipped_by_torch(level: str, wrapper: str) -> dict[str, Any]:
    run = Run(level, wrapper)
    run.loss(0).backward()
    refused = refusal_of(lambda: nn.utils.clip_grad_norm_(run.model.parameters(), 0.01))
    if "divided over the ranks" in refused:
        return {"refused": refused}
    gradients = [parameter.grad + 0 for parameter in run.model.parameters() if parameter.grad is not None]
    return {"norm": float(nn.utils.get_total_norm(gradients)), "same": are_same_on_ranks(gradients)}


def reported(level: str, _wrapper: str) -> dict[str, Any]:
    """Memory reports through wrappers of optimizers, after a step."""
    from accelerate import Accelerator
    from lightning_fabric.wrappers import _FabricOptimizer
    from pytorch_lightning.core.optimizer import LightningOptimizer
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    run = Run(level, "zero 1")
    run.step(0)
    expected = memory_report(run.model, run.optimizer)
    wrapped: dict[str, Any] = {
        "Accelerate": Accelerator(cpu=True).prepare(run.optimizer),
        "Lightning": LightningOptimizer(run.optimizer),
        "Fabric": _FabricOptimizer(run.optimizer, None),
        "PostLocalSGD": PostLocalSGDOptimizer(run.optimizer, PeriodicModelAverager(period=1)),
    }
    found: dict[str, Any] = {name: memory_report(run.model, optimizer) == expected for name, optimizer in wrapped.items()}
    plain = nn.Linear(64, 64, bias=False)
    divided = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.AdamW, lr=1e-3)
    plain(torch.ones(1, 64)).sum().backward()
    divided.step()
    states = memory_report(plain, divided)["exp_avg"]  # one rank has the one parameter
    found["ZeroRedundancy"] = states == (4 * 64 * 64 if divided.optim.param_groups[0]["params"] else 0)
    return found


def prepared_without_model(level: str, wrapper: str) -> dict[str, Any]:
    """Accelerate gets the optimizer alone, so `save_state` writes no model; then the model, too, without DDP around it."""
    from accelerate import Accelerator

    found: dict[str, Any] = {}
    for has_model in (False, True):
        folder = Path(os.environ["FOLDER"]) / f"{level}-{wrapper}-{has_model}"
        started = []
        for seed in (0, 1):
            accelerator = Accelerator(cpu=True)
            run = Run(level, wrapper, seed, accelerator if has_model else None)
            carry_model_state(run.model, run.optimizer)
            accelerator.prepare(run.optimizer)
            started.append((run, accelerator))
        (run, accelerator), (again, other) = started
        run.step(0)
        accelerator.save_state(str(folder))
        dist.barrier()
        found[f"refused {has_model}"] = refusal_of(lambda other=other, folder=folder: other.load_state(str(folder)))  # type: ignore[misc]
        for each in (run, again):
            each.step(1)
        found[f"continues {has_model}"] = all(map(torch.equal, run.values(), again.values()))
    return found


ACTIONS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "torch-ema": averaged_by_torch_ema,
    "AveragedModel": averaged_by_torch,
    "timm": averaged_by_timm,
    "GradScaler": scaled_and_clipped,
    "clip": clipped_by_torch,
    "report": reported,
    "Accelerate": prepared_without_model,
}


def act(rank: int, port: int, folder: str) -> None:
    found: dict[Any, Any] = {}
    os.environ["FOLDER"] = folder
    with torchrun(rank, port):
        for level in CHECKED:
            for name, do in ACTIONS.items():
                for wrapper in {"report": ("zero 1",), "Accelerate": ("zero 0", "zero 1")}.get(name, WRAPPERS):
                    with warnings.catch_warnings(record=True) as warned:
                        warnings.simplefilter("always")
                        said = refusal_of(lambda do=do, level=level, wrapper=wrapper: found.update({"": do(level, wrapper)}))  # type: ignore[misc]
                    found[name, level, wrapper] = found.pop("", {"refused": said})
                    found[name, level, wrapper]["warned"] = any("octet.AveragedModel" in str(each.message) for each in warned)
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def acted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("packages")
    run_ranks(act, (free_port(), str(folder)), NUM_RANKS)
    return saved_by_ranks(folder, NUM_RANKS)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("level", CHECKED)
def test_averages_have_all_digits_or_say_so(level: str, wrapper: str, acted: list[dict[Any, Any]]) -> None:
    """torch-ema reads codes if ranks divide what refines them: the warning names octet.AveragedModel."""
    is_coarse = wrapper == "zero 1" and level in COARSE
    for found in acted:
        ema, *copies = (found[name, level, wrapper] for name in ("torch-ema", "AveragedModel", "timm"))
        assert ema["warned"] == is_coarse
        assert ema["same"]
        assert max(ema["average"], ema["restored"], ema["loaded"]) < (0.04 if is_coarse else 1e-6)
        for mean in copies:
            if "refused" in mean:
                assert (level, wrapper) == ("O3-split", "zero 1")
                assert "divided over the ranks (ZeRO); allowed: copies of models that hold them" in mean["refused"]
            else:
                assert mean["warned"] == is_coarse
                assert mean["same"]
                assert mean["average"] < (0.04 if is_coarse else 1e-6)
                assert mean.get("loaded", 0.0) == 0.0


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("level", CHECKED)
def test_loss_scales_and_clipping_leave_what_they_leave_without(level: str, wrapper: str, acted: list[dict[Any, Any]]) -> None:
    for found in acted:
        scaled, clipped = found["GradScaler", level, wrapper], found["clip", level, wrapper]
        assert scaled["is the same"]
        assert scaled["same"]
        assert scaled["is skipped"]
        assert scaled["norms"] == pytest.approx(acted[0]["GradScaler", "bf16-amp", "ddp"]["norms"], rel=0.05)
        if wrapper == "zero 1":
            assert (
                "Allowed: Parallel.clip_grad_norm_(max_norm) in place of torch.nn.utils.clip_grad_norm_" in clipped["refused"]
            )
        else:
            assert clipped["norm"] == pytest.approx(0.01, rel=1e-3)
            assert clipped["same"]


@pytest.mark.parametrize("level", CHECKED)
def test_memory_is_reported_through_wrappers(level: str, acted: list[dict[Any, Any]]) -> None:
    for found in acted:
        reports = found["report", level, "zero 1"]
        assert all(is_same for name, is_same in reports.items() if name != "warned"), reports


@pytest.mark.parametrize("wrapper", ["zero 0", "zero 1"])
@pytest.mark.parametrize("level", CHECKED)
def test_accelerate_continues_a_model_that_it_got_and_refuses_another(
    level: str, wrapper: str, acted: list[dict[Any, Any]]
) -> None:
    for found in acted:
        result = found["Accelerate", level, wrapper]
        assert "call accelerator.prepare_model(model, evaluation_mode=True)" in result["refused False"]
        assert not result["continues False"]
        assert result["refused True"] == "nothing was refused"
        assert result["continues True"]
