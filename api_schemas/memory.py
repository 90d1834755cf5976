"""The rules of the training options that save memory: what each cannot be combined with, and why."""

from api_schemas.data import Unfit
from api_schemas.layout import BatchDivision
from api_schemas.models.base import FamilySpec
from api_schemas.precision import PrecisionSpec
from api_schemas.training import TrainingSpec


def misfit_of_memory(
    training: TrainingSpec, model: FamilySpec, precision: PrecisionSpec, zero_stage: int, batch: BatchDivision
) -> Unfit | None:
    """Return the first rule that an option to save memory breaks, or None."""
    return (
        _misfit_of_residual_stream(training, precision)
        or _misfit_of_saved_activations(training, zero_stage)
        or _misfit_of_fused_loss(training, model, precision)
        or _misfit_of_gradient_release(training, precision, batch)
        or _misfit_of_offload(training, zero_stage)
    )


def _misfit_of_residual_stream(training: TrainingSpec, precision: PrecisionSpec) -> Unfit | None:
    if training.residual_stream == "fp32" or precision.storage.gemm in ("bf16", "fp8"):
        return None
    allowed = f"fp32 at level {precision.level}, whose layers return {precision.storage.gemm}"
    change = "Remove training.residual_stream, or choose another precision.level, such as bf16-amp or O2."
    return Unfit("training.residual_stream", "bf16", allowed, change)


def _misfit_of_saved_activations(training: TrainingSpec, zero_stage: int) -> Unfit | None:
    if training.saved_activations == "exact":
        return None
    field, change = "training.saved_activations", "Set training.saved_activations to exact, or change the other."
    if training.activation_checkpointing != "none":
        allowed = "exact with activation_checkpointing, which decides itself what blocks keep"
        return Unfit(field, f"fp8 with activation_checkpointing {training.activation_checkpointing}", allowed, change)
    if zero_stage == 3:
        allowed = "exact at parallelism.zero_stage 3, whose hooks of blocks read what the forward pass returns"
        return Unfit(field, "fp8 with parallelism.zero_stage 3", allowed, change)
    return None


def _misfit_of_fused_loss(training: TrainingSpec, model: FamilySpec, precision: PrecisionSpec) -> Unfit | None:
    if not training.fused_loss:
        return None
    field = "training.fused_loss"
    if model.sizes.task == "image_class" or model.family == "python":
        allowed = "false unless the model predicts tokens and its loss is ours"
        return Unfit(field, f"true with model.family {model.family}", allowed, "Remove training.fused_loss.")
    if precision.storage.loss_scaling:
        allowed = f"false at level {precision.level}: it scales the loss by the gradient of the logits, which do not exist"
        return Unfit(field, True, allowed, "Remove training.fused_loss, or choose another precision.level, such as bf16-amp.")
    if precision.convert_heads:
        allowed = "false with precision.convert_heads: the products of a fused loss are in 16 bits or fp32"
        return Unfit(field, True, allowed, "Remove training.fused_loss or precision.convert_heads.")
    return None


def _misfit_of_gradient_release(training: TrainingSpec, precision: PrecisionSpec, batch: BatchDivision) -> Unfit | None:
    if not training.gradient_release:
        return None
    field, change = "training.gradient_release", "Remove training.gradient_release, or change the other."
    if training.optimizer.name == "sgd":
        allowed = "false with optimizer.name sgd, whose step gradient_clip bounds: with gradient_release there is no such norm"
        change = "Choose another training.optimizer.name, or remove training.gradient_release."
        return Unfit(field, "true with optimizer.name sgd", allowed, change)
    if training.gradient_clip is not None:
        allowed = "false with gradient_clip: the norm of all gradients is known only when the first are stepped and gone"
        change = "Set training.gradient_clip to null, or remove training.gradient_release."
        return Unfit(field, f"true with gradient_clip {training.gradient_clip:g}", allowed, change)
    if batch.micro_batch_size and batch.num_micro_batches > 1:
        allowed = "false with several micro-batches: a gradient is complete only after the last"
        return Unfit(field, f"true with {batch.num_micro_batches} micro-batches", allowed, change)
    if batch.num_data_ranks > 1:
        allowed = "false on several ranks, with ZeRO or without: a gradient is complete only when all ranks' are averaged"
        return Unfit(field, f"true with {batch.num_data_ranks} ranks", allowed, change)
    if precision.storage.loss_scaling:
        allowed = f"false at level {precision.level}: a step that overflows is skipped as a whole, after the last gradient"
        return Unfit(field, True, allowed, change)
    return None


def _misfit_of_offload(training: TrainingSpec, zero_stage: int) -> Unfit | None:
    if not (training.offload_optimizer and zero_stage):
        return None
    allowed = f"false at parallelism.zero_stage {zero_stage}, which divides the states among the ranks' devices"
    change = "Remove training.offload_optimizer or parallelism.zero_stage."
    return Unfit("training.offload_optimizer", True, allowed, change)
