"""What a context degree needs of a job: checked when the job is read, so that no rank starts in vain."""

from api_schemas.data import Unfit
from api_schemas.models.base import FamilySpec
from api_schemas.precision import PrecisionSpec
from api_schemas.resources import ParallelismSpec, ResourceSpec
from api_schemas.tensor import misfit_of_unproven
from api_schemas.training import TrainingSpec

_FIELD = "parallelism.context"


def misfit_of_context(
    parallelism: ParallelismSpec,
    resources: ResourceSpec,
    model: FamilySpec,
    precision: PrecisionSpec,
    training: TrainingSpec,
) -> Unfit | None:
    """Return the first rule that a job with a context degree breaks, or None."""
    degree, length = parallelism.context, training.sequence_length
    if degree == 1:
        return None
    num_together, degrees = degree * parallelism.tensor, f"parallelism.tensor · {_FIELD}" if parallelism.tensor > 1 else _FIELD
    if resources.workers % num_together:
        change = f"Change resources.workers or {_FIELD}."
        return Unfit("resources.workers", resources.workers, f"a multiple of {degrees}, {num_together}", change)
    if not model.sizes.divides_sequences:
        allowed = f"with {_FIELD}: gpt and llama, whose attention gathers keys and values"
        return Unfit("model", model.title, allowed, f"Change the model, or set {_FIELD} to 1.")
    if precision.storage.loss_scaling or precision.storage.engine == "torchao":
        allowed = f"with {_FIELD}: fp32, bf16-amp, te and the levels O1 to O3, which have been proven with it"
        return Unfit("precision.level", precision.level, allowed, f"Change precision.level, or set {_FIELD} to 1.")
    if length % (2 * degree):
        allowed = f"a multiple of 2 · {_FIELD}, {2 * degree}: each rank has two chunks of a sequence"
        return Unfit("training.sequence_length", length, allowed, f"Change training.sequence_length or {_FIELD}.")
    if parallelism.sequence and length % num_together:
        allowed = f"a multiple of {degrees}, {num_together}, with parallelism.sequence: each rank has as many tokens in blocks"
        return Unfit("training.sequence_length", length, allowed, "Change training.sequence_length or a degree.")
    if training.ema_decay is not None:
        allowed = f"none with {_FIELD}: the average is evaluated on whole sequences"
        return Unfit("training.ema_decay", training.ema_decay, allowed, "Remove training.ema_decay.")
    return misfit_of_unproven(training, _FIELD, "tokens")
