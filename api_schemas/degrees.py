"""What the degrees of parallelism need of a job: checked when the job is read, so that no rank starts in vain."""

from api_schemas.adapter import AdapterSpec
from api_schemas.compiling import misfit_of_compiling
from api_schemas.context import misfit_of_context
from api_schemas.data import Unfit
from api_schemas.models.base import FamilySpec
from api_schemas.pipeline import misfit_of_pipeline
from api_schemas.precision import PrecisionSpec
from api_schemas.resources import ParallelismSpec, ResourceSpec
from api_schemas.tensor import misfit_of_tensor
from api_schemas.training import TrainingSpec


def misfit_of_degrees(
    parallelism: ParallelismSpec,
    resources: ResourceSpec,
    model: FamilySpec,
    precision: PrecisionSpec,
    training: TrainingSpec,
    adapter: AdapterSpec | None,
) -> Unfit | None:
    """Return the first rule that a job with a pipeline, a tensor or a context degree breaks, or None."""
    parts = parallelism, resources, model, precision, training, adapter
    unfit = misfit_of_pipeline(*parts) or misfit_of_tensor(*parts) or misfit_of_context(*parts[:5])
    return unfit or misfit_of_compiling(parallelism, training)
