"""Start a job's model: from random values, or from a folder, whose weights are read as the level converts them."""

import logging
from pathlib import Path

import torch

from api_schemas import ANY_FILE, FamilySpec, Files, Unfit
from worker.errors import InvalidConfig
from worker.models import TrainedModel, build_model
from worker.models.huggingface import build_without_values
from worker.models.meta import parameters_on_meta
from worker.pretrained.files import PretrainedFiles
from worker.pretrained.load import FileSource

logger = logging.getLogger(__name__)


def start_model(
    spec: FamilySpec, seed: int, files: Files = ANY_FILE, device: torch.device | str = "cpu"
) -> tuple[TrainedModel, FileSource | None]:
    """Return the network that a job asks for, on the device, and None; or on `meta`, and what gives it its values.

    The second holds for a folder whose tensors are the network's own, name by name: no fp32 copy of the weights is made. Other
    folders, such as those whose experts transformers joins, are read as a whole. Raises InvalidConfig.
    """
    device = torch.device(device)
    if spec.files is not None:
        with parameters_on_meta():
            model = build_without_values(spec, files)
        if (source := _source(model, Path(spec.files), files, device)) is not None:
            return model, source
    return build_model(spec, seed, files).to(device), None


def _source(model: TrainedModel, folder: Path, files: Files, device: torch.device) -> FileSource | None:
    try:
        source = FileSource(PretrainedFiles(folder, files), model, device)
    except Unfit as unfit:
        raise InvalidConfig(str(unfit).replace("data.path", "model.path")) from None
    except (OSError, ValueError) as error:
        logger.info("the weights are read as a whole by transformers: %s", error)
        return None
    if unknown := source.unknown_names():
        logger.info("the weights are read as a whole by transformers: the model has no %s", unknown[0])
        return None
    return source
