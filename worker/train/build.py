"""Build what a job trains: its model, converted and on the mesh, with all that a step needs."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from octet.api_schemas import EventReport, FamilySizes, ReportBody
from octet.worker.checkpoint.host_copies import HostCopies
from octet.worker.common.config import TrainConfig
from octet.worker.fp8.convert import ConversionReport
from octet.worker.fp8.experts import experts_of
from octet.worker.fp8.health import HealthEvent, LayerDemoted, StepKeeper
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.mesh import Mesh
from octet.worker.metrics.memory import memory_report
from octet.worker.metrics.table import Metrics
from octet.worker.optim import build_optimizer
from octet.worker.optim.schedule import parameter_groups
from octet.worker.parallel import Parallel, on_mesh
from octet.worker.prepare.adapters import add_adapters, attach_adapters
from octet.worker.prepare.average import AveragedModel
from octet.worker.prepare.blocks import WARM_UP_STEPS, CompileWatch
from octet.worker.prepare.initialize import prepare
from octet.worker.prepare.memory_options import prepare_steps
from octet.worker.pretrained.job_export import check_export
from octet.worker.pretrained.start import start_job
from octet.worker.train.step_graph import StepGraph, step_graph_of


class MovingAverage:
    """The average of a converted model's weights, or nothing if `decay` is None. Every rank holds it whole.

    average = decay · average + (1 - decay) · weight after each step; the first step's weights begin it (Polyak and Juditsky
    1992; Touvron et al. 2021, table 9). A weight stored as codes is averaged in fp32.
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self._average = None
        if decay is not None:
            self._average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
            self._average.requires_grad_(False)

    def update(self, model: nn.Module) -> None:
        """Take in the weights after a step."""
        if self._average is not None:
            self._average.update_parameters(model)

    def best(self, model: nn.Module) -> nn.Module:
        """Return the network to evaluate and export: the average once it has begun, else the model."""
        return model if self._average is None or not self._average.n_averaged else self._average.module

    @property
    def num_bytes(self) -> int:
        """Bytes of the averaged weights."""
        return 0 if self._average is None else memory_report(self._average.module, None)["weights"]

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of steps in it; nothing if there is none."""
        return {} if self._average is None else exact_state_dict(self._average)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a saved average. From a checkpoint without one, the average begins with the next step."""
        if self._average is not None and state:
            self._average.load_state_dict(state)


class Tell(Protocol):
    """Sends a report from the first rank. is_sent: from this rank too."""

    def __call__(self, body: ReportBody, *, is_sent: bool = False) -> None: ...


@dataclass
class JobModel:
    """A job's model on this rank, with all that trains it.

    health: follows FP8 from step to step; None at levels that have nothing to follow. compiling:
    None where nothing is compiled.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    conversion: ConversionReport
    parallel: Parallel
    average: MovingAverage
    health: StepKeeper | None
    compiling: CompileWatch | None
    graph: StepGraph
    flops_per_token: float

    @property
    def num_warm_up_steps(self) -> int:
        """The first steps of an attempt, in which kernels load, blocks compile, graphs are recorded."""
        return self.graph.num_warm_up_steps or (WARM_UP_STEPS if self.compiling else 1)


def build(config: TrainConfig, mesh: Mesh, copies: HostCopies, tell: Tell, metrics: Metrics) -> JobModel:
    """Start a job's model, convert it, put it on the mesh, and give it the values that it lacks.

    All ranks call it together.

    copies: of the checkpoints that will be written. Raises InvalidConfig, and DoesNotFit.
    """
    torch.manual_seed(config.seed)
    started = start_job(config, mesh.device)
    for event in started.events:
        tell(event)
    model: nn.Module = started.model
    add_adapters(model, config.adapter, config.precision, config.seed, mesh.device)
    flops = flops_per_token(config.sizes, started.model, config.sequence_length)
    optimizer = build_optimizer(parameter_groups(model, config.optimizer), config.optimizer, config.gradient_clip)

    prepared = prepare(
        model,
        optimizer,
        config.precision,
        seed=config.seed,
        tokens=config.tokens_per_pass,
        on_event=partial(_report_health, tell, metrics, mesh, frozenset(experts_of(model))),
        source=started.source,
    )
    model = prepared.model
    check_export(config, model)
    assert prepared.optimizer is not None
    optimizer = prepared.optimizer
    started.make_masters(model, optimizer)
    attach_adapters(model)
    average = MovingAverage(model, config.training.ema_decay)
    compiling = prepare_steps(model, optimizer, config.training, mesh.device)

    parallel = on_mesh(model, optimizer, mesh, config.parallelism)
    started.fill(parallel)
    copies.copy_buffers_at_once(model)
    graph = step_graph_of(config, model, optimizer, prepared.health, mesh.device, mesh)
    return JobModel(model, optimizer, prepared.report, parallel, average, prepared.health, compiling, graph, flops)


def _report_health(tell: Tell, metrics: Metrics, mesh: Mesh, experts: frozenset[str], event: HealthEvent) -> None:
    """Count a layer that was demoted or came back, and report it, on the first of the ranks that hold it."""
    if isinstance(event, LayerDemoted):
        metrics.observe_demotions(1)
        kind, change = "layer.demoted", f"computes in bf16 from step {event.step} on: {event.operand} {event.reason}"
    else:
        metrics.observe_demotions(-1)
        kind, change = "layer.recovered", f"multiplies in FP8 again from step {event.step} on"
    body = EventReport(type=kind, message=f"layer {event.layer!r} {change}", data={"layer": event.layer, "step": event.step})
    holders = mesh.expert_replicas if event.layer in experts and mesh.expert.size > 1 else mesh.stage
    tell(body, is_sent=holders.is_first)


def flops_per_token(sizes: FamilySizes, model: nn.Module, sequence_length: int) -> float:
    """FLOPs of the model for one token, forward and backward, without recomputation. Call it before conversion."""
    counted = sizes.flops_per_token(sequence_length)
    return linear_flops_per_token(model) if counted is None else counted


def linear_flops_per_token(model: nn.Module) -> float:
    """FLOPs of the linear layers for one token, forward and backward: 6 for each element of a weight, 4 of a frozen one.

    An expert counts by the share of the tokens that it sees. Attention's products with each other, convolutions and experts of
    other classes than transformers' are not counted, so a utilization computed from this number is too low rather than too
    high. Call it before conversion.
    """
    shares = {module.weight: 1.0 for module in model.modules() if isinstance(module, nn.Linear)}
    for module in model.modules():
        if (share := _share_of_tokens(module)) is not None:
            named = module.named_parameters()
            shares |= {weight: share for name, weight in named if weight.dim() > 1 and not name.endswith("bias")}
    return sum((6.0 if weight.requires_grad else 4.0) * share * weight.numel() for weight, share in shares.items())


def _share_of_tokens(module: nn.Module) -> float | None:
    """Return the share that each of a mixture's experts sees, on average; None for other modules than transformers' experts."""
    num_of_token = getattr(getattr(module, "config", None), "num_experts_per_tok", None)
    return num_of_token / module.num_experts if num_of_token and {"num_experts", "has_gate"} <= vars(module).keys() else None
