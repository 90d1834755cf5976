"""MS-AMP's `msamp.deepspeed`: DeepSpeed's `initialize` and its engine, over `octet.parallelize`.

    from octet.compat.msamp import deepspeed
    engine, optimizer, loader, schedule = deepspeed.initialize(args=args, model=model, training_data=samples)
    loss = criterion(engine(inputs), targets); engine.backward(loss); engine.step()

The configuration is read as `octet import deepspeed` reads it, and what it leaves over that matters is a warning. DeepSpeed is
not needed, and neither are its kernels.
"""

import json
import os
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import log
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from octet.api_schemas.imports.deepspeed import from_deepspeed
from octet.api_schemas.imports.patch import Given, Patch
from octet.api_schemas.optimization import OptimizerSpec, ScheduleSpec
from octet.api_schemas.precision import PrecisionSpec
from octet.compat.msamp import kept_layers
from octet.worker import compile_blocks, load_checkpoint, offload_optimizer, parallelize, save_checkpoint
from octet.worker import initialize as convert
from octet.worker.optim.registry import build_optimizer
from octet.worker.optim.schedule import learning_rate_at

_WARMUP = "scheduler.params.warmup_type"
"""Left over by a job, whose warm-up is a line; the engine has DeepSpeed's own."""

__all__ = ["Engine", "add_config_arguments", "init_distributed", "initialize"]


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add DeepSpeed's options of a command line: --deepspeed and --deepspeed_config FILE."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed's configuration, as octet.compat.msamp reads it")
    group.add_argument("--deepspeed", action="store_true", help="kept for programs that have it; the file decides")
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed's JSON")
    return parser


def init_distributed(dist_backend: str | None = None) -> None:
    """Start the process group of torchrun's ranks, or that of this process alone; once it is there, do nothing."""
    if dist.is_initialized():
        return
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(_local_rank())
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def initialize(  # noqa: PLR0913  DeepSpeed's own arguments
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    model_parameters: Iterable[nn.Parameter] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> tuple["Engine", torch.optim.Optimizer, "DataLoader[Any] | None", Any]:
    """Convert a model and divide its training as DeepSpeed's configuration says.

    Returns the engine, its optimizer, the batches of `training_data` if there is any, and the schedule if there is one.
    args: with `deepspeed_config`, in the place of config. optimizer: in the place of the configuration's own.
    Raises ValueError without a model or a configuration, as `octet import deepspeed` does for a wrong one, and as
    `octet.initialize` and `octet.parallelize` do. Warns of settings that matter and are not applied.
    """
    if model is None:
        raise ValueError("model is None; allowed: a torch.nn.Module. Give deepspeed.initialize(model=…).")
    document = _read(config if config is not None else getattr(args, "deepspeed_config", None))
    init_distributed()
    patch = from_deepspeed(document, Given(workers=dist.get_world_size()))
    for left in patch.left:
        if left.matters and not left.setting.startswith(_WARMUP):
            warnings.warn(f"not applied: {left.setting}: {left.reason}", stacklevel=2)
    model.to(torch.device("cuda", _local_rank()) if torch.cuda.is_available() else torch.device("cpu"))
    if optimizer is None:
        optimizer = _optimizer(patch, list(model.parameters() if model_parameters is None else model_parameters))
    engine = Engine(model, optimizer, patch)
    if lr_scheduler is None:
        lr_scheduler = _schedule(patch, engine.optimizer)
    engine.lr_scheduler = lr_scheduler
    loader = None if training_data is None else _loader(training_data, engine.train_micro_batch_size_per_gpu(), collate_fn)
    return engine, engine.optimizer, loader, lr_scheduler


class Engine(nn.Module):
    """DeepSpeed's engine for one model: forward, `backward` and `step`, on every rank alike.

    fp16_enabled() is False: inputs stay as they are, and the level chooses what products are computed in.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, patch: Patch) -> None:
        """patch: what a configuration means. The model is on its device."""
        super().__init__()
        job, training = patch.job, patch.job["training"]
        precision = PrecisionSpec.model_validate({**job["precision"], "convert_heads": True, "exclude": kept_layers(model)})
        converted, adopted = convert(model, optimizer, precision)
        assert adopted is not None
        self.module, self.optimizer = converted, adopted
        if training.get("offload_optimizer"):
            offload_optimizer(adopted)
        if training.get("compile") == "on":
            compile_blocks(converted)
        self.parallel = parallelize(converted, adopted, **job["parallelism"])
        self.lr_scheduler: Any = None
        self.global_steps = self.micro_steps = 0
        self._clip: float | None = training.get("gradient_clip")
        whole = training.get("global_batch_size")
        if whole is None:
            raise ValueError(
                "the configuration has no batch; allowed: train_batch_size, or train_micro_batch_size_per_gpu. Set one of them."
            )
        data_ranks = self.parallel.data.size
        self._per_rank: int = training.get("micro_batch_size") or whole // data_ranks
        self._accumulated: int = max(1, whole // (self._per_rank * data_ranks))
        self._norm: Tensor | None = None

    @property
    def local_rank(self) -> int:
        """The number of this rank on its node, which is that of its GPU."""
        return _local_rank()

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return next(self.module.parameters()).device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> Tensor:
        """Add this micro-batch's gradients to those of the step; ranks exchange them in the last one."""
        with self.parallel.no_sync(not self.is_gradient_accumulation_boundary()):
            (loss / self._accumulated).backward()
        return loss

    def step(self) -> None:
        """Take the optimizer's step after the last micro-batch of a step; before it only count."""
        if self.is_gradient_accumulation_boundary():
            if self._clip is not None:
                self._norm = self.parallel.clip_grad_norm_(self._clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
            self.global_steps += 1
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True in the last micro-batch of a step."""
        return (self.micro_steps + 1) % self._accumulated == 0

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of a step."""
        return self._accumulated

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of this rank in one forward pass."""
        return self._per_rank

    def train_batch_size(self) -> int:
        """Return the samples of all ranks in one step."""
        return self._per_rank * self._accumulated * self.parallel.data.size

    def get_global_grad_norm(self) -> Tensor | None:
        """Return the norm of all gradients in the last step, before clipping; None where nothing is clipped."""
        return self._norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def fp16_enabled(self) -> bool:
        """Return False: a program that asks so whether to call `half()` on its inputs leaves them."""
        return False

    def save_checkpoint(self, save_dir: str, tag: str | None = None, client_state: dict[str, Any] | None = None) -> bool:
        """Write the state as `octet.save_checkpoint` does, in the folder of a tag if it has one."""
        schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        counts = {"global_steps": self.global_steps, "micro_steps": self.micro_steps}
        extra = {"client_state": client_state or {}, "schedule": schedule, **counts}
        save_checkpoint(self.parallel, Path(save_dir) / (tag or ""), self.global_steps, extra)
        return True

    def load_checkpoint(self, load_dir: str, tag: str | None = None) -> tuple[str | None, dict[str, Any]]:
        """Continue from a folder's newest checkpoint. Returns the folder and what the client saved, or None and {}."""
        folder = Path(load_dir) / (tag or "")
        loaded = load_checkpoint(self.parallel, folder)
        if loaded is None:
            return None, {}
        self.global_steps, self.micro_steps = loaded.extra["global_steps"], loaded.extra["micro_steps"]
        if self.lr_scheduler is not None and loaded.extra["schedule"] is not None:
            self.lr_scheduler.load_state_dict(loaded.extra["schedule"])
        return str(folder), loaded.extra["client_state"]


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _read(config: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any]:
    if config is None:
        raise ValueError("there is no configuration; allowed: config, or args.deepspeed_config. Give a path or a dict.")
    if isinstance(config, Mapping):
        return config
    document = json.loads(Path(config).read_text())
    if not isinstance(document, dict):
        raise ValueError(f"{config} holds {type(document).__name__}; allowed: an object with DeepSpeed's settings. Change it.")
    return document


def _optimizer(patch: Patch, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    options = patch.get("training.optimizer")
    if options is None or "name" not in options:
        raise ValueError(
            "the configuration has no optimizer that octet has; allowed: Adam, AdamW, Lion or SGD there. Change it, or give "
            "deepspeed.initialize(optimizer=…)."
        )
    return build_optimizer([{"params": parameters}], OptimizerSpec.model_validate(options), patch.get("training.gradient_clip"))


def _schedule(patch: Patch, optimizer: torch.optim.Optimizer) -> LambdaLR | None:
    options = patch.get("training.schedule")
    if options is None or "name" not in options:
        return None
    # A constant learning rate needs no end.
    num_steps = patch.get("training.steps") or 1
    schedule = ScheduleSpec.model_validate(options)
    is_log = any(left.setting.startswith(_WARMUP) for left in patch.left)
    factor = partial(learning_rate_at, peak=1.0, schedule=schedule, num_steps=num_steps)
    return LambdaLR(optimizer, partial(_log_warmup, schedule.warmup_steps, factor) if is_log else factor)


def _log_warmup(num_steps: int, factor: Callable[[int], float], step: int) -> float:
    """Return DeepSpeed's factor of a step, counted from 0: log(step) / log(num_steps), and 0 in the first two steps."""
    if step <= num_steps:
        return log(step) / log(max(2, num_steps)) if step else 0.0
    return factor(step)


def _loader(samples: Dataset[Any], batch_size: int, collate_fn: Callable[[list[Any]], Any] | None) -> DataLoader[Any]:
    """Return this rank's batches, in an order of its own."""
    sampler: DistributedSampler[Any] = DistributedSampler(samples, shuffle=True)
    return DataLoader(samples, batch_size=batch_size, sampler=sampler, collate_fn=collate_fn, drop_last=True)
