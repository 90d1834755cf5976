"""What a pipeline degree needs of a job: checked when the job is read, so that no rank starts in vain."""

from api_schemas.adapter import AdapterSpec
from api_schemas.data import Unfit
from api_schemas.layout import BatchDivision
from api_schemas.models.base import FamilySpec
from api_schemas.precision import PrecisionSpec
from api_schemas.resources import STAGES_PER_RANK, ParallelismSpec, ResourceSpec
from api_schemas.tensor import misfit_of_unproven
from api_schemas.training import TrainingSpec

_FIELD = "parallelism.pipeline"


def misfit_of_pipeline(
    parallelism: ParallelismSpec,
    resources: ResourceSpec,
    model: FamilySpec,
    precision: PrecisionSpec,
    training: TrainingSpec,
    adapter: AdapterSpec | None,
) -> Unfit | None:
    """Return the first rule that a job with a pipeline breaks, or None."""
    if parallelism.pipeline == 1:
        if parallelism.schedule != "1f1b":
            change = f"Set {_FIELD}, or remove parallelism.schedule."
            return Unfit(
                "parallelism.schedule", parallelism.schedule, f"1f1b where {_FIELD} is 1: there is no pipeline", change
            )
        return None
    unfit = _misfit_of_combination(parallelism, resources, precision, adapter)
    return unfit or _misfit_of_training(training) or _misfit_of_blocks(parallelism, model)


def misfit_of_schedule(batch: BatchDivision, parallelism: ParallelismSpec) -> Unfit | None:
    """Return why a pipeline's schedule cannot take the step's micro-batches, or None."""
    degree, found = parallelism.pipeline, batch.num_micro_batches
    if degree == 1 or (found >= degree and (parallelism.schedule == "1f1b" or found % degree == 0)):
        return None
    is_interleaved = parallelism.schedule == "interleaved"
    allowed = (
        f"a size that gives each rank {'a multiple of' if is_interleaved else 'at least'} {degree} micro-batches in a step"
    )
    allowed = f"{allowed} with {_FIELD} {degree}{' and schedule interleaved' * is_interleaved}; it gives {found}"
    change = "Lower training.micro_batch_size, or raise training.global_batch_size."
    return Unfit("training.micro_batch_size", batch.micro_batch_size, allowed, change)


def _misfit_of_combination(
    parallelism: ParallelismSpec, resources: ResourceSpec, precision: PrecisionSpec, adapter: AdapterSpec | None
) -> Unfit | None:
    degree = parallelism.pipeline
    if (context := parallelism.context) > 1:
        allowed = f"1 with {_FIELD}, which is combined with tensor and data parallel ranks and zero_stage 0 or 1"
        return Unfit("parallelism.context", context, allowed, f"Set parallelism.context or {_FIELD} to 1.")
    if parallelism.zero_stage > 1:
        allowed = f"0 or 1 with {_FIELD}: stages 2 and 3 would exchange gradients, or gather weights, for each micro-batch"
        return Unfit("parallelism.zero_stage", parallelism.zero_stage, allowed, f"Lower it, or set {_FIELD} to 1.")
    product, num_ranks, change = _FIELD, degree, f"Change resources.workers or {_FIELD}."
    if parallelism.tensor > 1:
        product, num_ranks = f"{_FIELD} · parallelism.tensor", degree * parallelism.tensor
        change = "Change resources.workers or the degrees."
    if resources.workers % num_ranks:
        return Unfit("resources.workers", resources.workers, f"a multiple of {product}, {num_ranks}", change)
    if precision.storage.engine == "torchao":
        allowed = f"with {_FIELD}: every level but ao, whose layers have not been proven there"
        return Unfit("precision.level", precision.level, allowed, f"Use te, or set {_FIELD} to 1.")
    if adapter is not None:
        return Unfit(_FIELD, degree, "1 with adapter: adapters are small and whole on every rank", f"Set {_FIELD} to 1.")
    return None


def _misfit_of_training(training: TrainingSpec) -> Unfit | None:
    if training.ema_decay is not None:
        allowed = f"none with {_FIELD}: the average is of all weights, whole on every rank"
        return Unfit("training.ema_decay", training.ema_decay, allowed, "Remove training.ema_decay.")
    return misfit_of_unproven(training, _FIELD, "blocks")


def _misfit_of_blocks(parallelism: ParallelismSpec, model: FamilySpec) -> Unfit | None:
    degree, num_stages = parallelism.pipeline, parallelism.pipeline * STAGES_PER_RANK[parallelism.schedule]
    num_layers = model.sizes.num_blocks_in_stages
    if num_layers is None:
        return Unfit("model", model.title, f"with {_FIELD}: gpt, llama", f"Change the model, or set {_FIELD} to 1.")
    if num_layers < num_stages:
        allowed = f"at least {num_stages}, one block for each stage of the pipeline"
    elif parallelism.schedule == "interleaved" and num_layers % num_stages:
        allowed = f"a multiple of {num_stages}: with schedule interleaved each of {degree} ranks has two runs of as many blocks"
    else:
        return None
    return Unfit("model.num_layers", num_layers, allowed, f"Change model.num_layers or {_FIELD}.")
