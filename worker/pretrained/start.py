"""Start a job's model: from random values, or from a folder, whose weights are read as the level converts them.

Where ranks divide the model it is started without values, and no rank ever holds it whole (`parallel/parallel.py`).
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from octet.api_schemas import ANY_FILE, EventReport, FamilySpec, Files, SpecConflict
from octet.api_schemas.precision import PrecisionSpec
from octet.worker.common.config import TrainConfig
from octet.worker.common.errors import InvalidConfig
from octet.worker.fp8.experts import unstack_experts
from octet.worker.models import TrainedModel, build_model
from octet.worker.models.huggingface import build_from, build_without_values
from octet.worker.models.initial import parameters_on_meta
from octet.worker.optim import LowBitOptimizer
from octet.worker.parallel import Parallel
from octet.worker.parallel.materialize import Values, materialize
from octet.worker.prepare.convert import WeightSource
from octet.worker.pretrained.files import PretrainedFiles
from octet.worker.pretrained.load import FileSource, ReadValues
from octet.worker.pretrained.values import DrawnValues, change_start

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartedModel:
    """A model before it is converted. source: gives it its values as it is converted; None where it has them.

    values: gives it its values after ranks have divided it. events: what a person should know of it.
    """

    model: TrainedModel
    source: WeightSource | None = None
    values: Values | None = None
    events: tuple[EventReport, ...] = ()

    def make_masters(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Make the master weights of a whole model that was read from a folder."""
        if self.values is None and isinstance(self.source, FileSource):
            self.source.make_masters(model, optimizer)

    def fill(self, parallel: Parallel) -> None:
        """Give a divided model the values that it lacks, if it lacks them. Raises DoesNotFit."""
        if self.values is not None:
            assert isinstance(parallel.optimizer, LowBitOptimizer)  # that of every job after `prepare`
            materialize(parallel.model, parallel.optimizer, parallel, self.values)


def start_job(config: TrainConfig, device: torch.device) -> StartedModel:
    """Start the model of a job. Where ranks divide it, each makes its own share only, or an event gives the reason.

    Raises InvalidConfig.
    """
    reason = why_whole(config) if divides(config) else None
    if divides(config) and reason is None:
        spec, files = config.model, config.readable_files
        with parameters_on_meta():
            model = build_model(spec, config.seed, files) if spec.files is None else build_without_values(spec, files)
        unstack_experts(model, config.precision)
        if spec.files is None:
            drawn = DrawnValues(model, config.seed, device, config.training.start_change)
            return StartedModel(model, drawn, drawn)
        if (source := _source(model, _opened(spec, files), device)) is not None:
            return StartedModel(model, source, ReadValues(source, model))
        reason = "the tensors of its folder are not the network's own, so transformers reads them all"
    started = start_model(
        config.model, config.seed, config.readable_files, device, config.precision, config.training.start_change
    )
    return StartedModel(*started, events=_whole_events(reason))


def start_model(
    spec: FamilySpec,
    seed: int,
    files: Files = ANY_FILE,
    device: torch.device | str = "cpu",
    precision: PrecisionSpec | None = None,
    start_change: float = 0.0,
) -> tuple[TrainedModel, FileSource | None]:
    """Return the whole network of a spec, on the device, and None; or on `meta`, and what gives it its values.

    The second holds for a folder whose tensors are the network's own, name by name: no fp32 copy of the weights is made. Other
    folders are read as a whole, and with `start_change` all are. precision: of the job, at whose level experts of a mixture
    are read one by one. start_change: as in `change_values`. Raises InvalidConfig.
    """
    device = torch.device(device)
    if spec.files is not None and not start_change:
        with parameters_on_meta():
            model = build_without_values(spec, files)
        if precision is not None:
            unstack_experts(model, precision)
        if (source := _source(model, _opened(spec, files), device)) is not None:
            return model, source
    model = build_model(spec, seed, files) if spec.files is None else read_model(spec, files)
    change_start(model, start_change, seed)
    model = model.to(device)
    if precision is not None:
        unstack_experts(model, precision)
    return model, None


def read_model(spec: FamilySpec, files: Files = ANY_FILE) -> TrainedModel:
    """Return the network of a folder on the CPU in fp32, as transformers makes it of all its tensors. Raises InvalidConfig."""
    weights = _opened(spec, files)
    try:
        tensors = {name: weights.read(name) for name in weights.names}
    except ValueError as error:
        raise InvalidConfig(f"model.path {spec.files}: {error}") from error
    return build_from(spec, tensors, files)


def divides(config: TrainConfig) -> bool:
    """Return whether the ranks of a job divide its model or its optimizer's states."""
    return config.layout.num_ranks > 1 and (
        config.layout.tensor * config.layout.pipeline * config.layout.expert > 1 or config.parallelism.zero_stage > 0
    )


def why_whole(config: TrainConfig) -> str | None:
    """Return why each rank has to make the whole model before it is divided; None where it does not."""
    if config.adapter is not None:
        return "adapters are added to a model that has its values"
    if config.training.ema_decay is not None:
        return "training.ema_decay keeps the average of whole weights on every rank"
    if config.precision.storage.engine == "torchao":
        return "level ao converts layers that have their values"
    if config.model.files is not None and config.training.start_change:
        return "training.start_change changes values that are read as a whole"
    if config.model.files is None and not config.model.sizes.capabilities.draws_by_parameter:
        return f"the classes of family {config.model.family} draw their values when they are built"
    return None


def _whole_events(reason: str | None) -> tuple[EventReport, ...]:
    if reason is None:
        return ()
    message = f"each rank makes the whole model before it keeps its share, and has to have memory for that: {reason}"
    logger.warning(message)
    return (EventReport(type="model.made_whole", message=message),)


def _opened(spec: FamilySpec, files: Files) -> PretrainedFiles:
    """Open the folder of a model. Raises InvalidConfig."""
    assert spec.files is not None
    try:
        return PretrainedFiles(Path(spec.files), files)
    except SpecConflict as conflict:
        raise InvalidConfig(str(conflict).replace("data.path", "model.path")) from None
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"model.path {spec.files}: {error} Save the model again.") from error


def _source(model: TrainedModel, weights: PretrainedFiles, device: torch.device) -> FileSource | None:
    """Return what reads the folder tensor by tensor; None where transformers has to. Raises InvalidConfig."""
    try:
        source = FileSource(weights, model, device)
    except SpecConflict as conflict:
        raise InvalidConfig(str(conflict)) from None
    except ValueError as error:
        logger.info("the weights are read as a whole by transformers: %s", error)
        return None
    if unknown := source.unknown_names():
        logger.info("the weights are read as a whole by transformers: the model has no %s", unknown[0])
        return None
    return source
