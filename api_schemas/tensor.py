"""What a tensor degree needs of a job: checked when the job is read, so that no rank starts in vain."""

from api_schemas.adapter import AdapterSpec
from api_schemas.data import Unfit
from api_schemas.models.base import FamilySpec
from api_schemas.precision import PrecisionSpec
from api_schemas.resources import ParallelismSpec, ResourceSpec
from api_schemas.training import TrainingSpec

_FIELD = "parallelism.tensor"
_UNPROVEN = {"fused_loss": False, "saved_activations": "exact", "gradient_release": False, "offload_optimizer": False}
"""Options of a training that save memory, with their values in a job with such a degree."""


def misfit_of_tensor(
    parallelism: ParallelismSpec,
    resources: ResourceSpec,
    model: FamilySpec,
    precision: PrecisionSpec,
    training: TrainingSpec,
    adapter: AdapterSpec | None,
) -> Unfit | None:
    """Return the first rule that a job with a tensor degree breaks, or None. Sizes that only a rank knows are checked there."""
    degree = parallelism.tensor
    if degree == 1:
        return _misfit_of_sequence(parallelism, training)
    if resources.workers % degree:
        change = "Change resources.workers or parallelism.tensor."
        return Unfit("resources.workers", resources.workers, f"a multiple of {_FIELD}, {degree}", change)
    if precision.storage.loss_scaling or precision.storage.engine == "torchao":
        allowed = f"with {_FIELD}: fp32, bf16-amp, te and the levels O1 to O3, whose layers and losses ranks can divide"
        return Unfit("precision.level", precision.level, allowed, f"Change precision.level, or set {_FIELD} to 1.")
    if adapter is not None:
        return Unfit(_FIELD, degree, "1 with adapter: adapters are whole on every rank", f"Set {_FIELD} to 1.")
    if training.ema_decay is not None:
        allowed = f"none with {_FIELD}: the average is of all weights, whole on every rank"
        return Unfit("training.ema_decay", training.ema_decay, allowed, "Remove training.ema_decay.")
    unfit = misfit_of_unproven(training, _FIELD, "layers") or _misfit_of_sizes(model, degree)
    return unfit or _misfit_of_sequence(parallelism, training)


def misfit_of_unproven(training: TrainingSpec, field: str, what: str) -> Unfit | None:
    """Return the first option to save memory that a job sets with a degree, or None. field: the degree. what: it divides."""
    for name, default in _UNPROVEN.items():
        if (value := getattr(training, name)) != default:
            allowed = f"{str(default).lower()} with {field}: it has not been proven for {what} that ranks divide"
            return Unfit(f"training.{name}", value, allowed, f"Remove training.{name}, or set {field} to 1.")
    return None


def _misfit_of_sequence(parallelism: ParallelismSpec, training: TrainingSpec) -> Unfit | None:
    """Return the rule that dividing the tokens over the tensor ranks breaks, or None."""
    field, degree, length = "parallelism.sequence", parallelism.tensor, training.sequence_length
    if not parallelism.sequence:
        return None
    if degree == 1:
        allowed = f"false with {_FIELD} 1: it divides the tokens over the ranks that divide the layers"
        return Unfit(field, True, allowed, f"Set {_FIELD} to 2 or more, or remove {field}.")
    if length % degree:
        allowed = f"a multiple of {_FIELD}, {degree}, with {field}: each rank has as many tokens"
        return Unfit("training.sequence_length", length, allowed, f"Change training.sequence_length, or remove {field}.")
    return None


def _misfit_of_sizes(model: FamilySpec, degree: int) -> Unfit | None:
    sizes = model.sizes.divided_sizes
    if sizes is None:
        allowed = (
            f"with {_FIELD}: gpt, llama, and architectures of transformers that have a plan for it, such as llama, mistral, "
            "qwen2, qwen3, gemma2 and gpt_neox"
        )
        return Unfit("model", model.title, allowed, f"Change the model, or set {_FIELD} to 1.")
    for name, size in sizes.items():
        if size % degree:
            allowed = f"a multiple of {_FIELD}, {degree}: each rank has as many"
            return Unfit(f"model.{name}", size, allowed, f"Change model.{name} or {_FIELD}.")
    return None
