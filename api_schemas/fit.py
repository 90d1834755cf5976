"""The rules that tie a model to its data: checked when a job is read, and again once the files of its model are read."""

from api_schemas.adapter import AdapterSpec
from api_schemas.data import ImagesSpec, SourceSpec, Unfit
from api_schemas.elastic import misfit_of_elastic
from api_schemas.inputs import ImageInput, TokenInput
from api_schemas.layout import BatchDivision
from api_schemas.memory import misfit_of_memory
from api_schemas.models.base import FamilySpec
from api_schemas.pipeline import misfit_of_schedule
from api_schemas.precision import PrecisionSpec
from api_schemas.resources import ParallelismSpec, ResourceSpec
from api_schemas.training import DEFAULT_SEQUENCE_LENGTH, TrainingSpec


def tokens_per_sample(takes: TokenInput | ImageInput, sequence_length: int) -> int:
    """Return the tokens of one sample: those of a sequence, or those that the model takes from an image."""
    return takes.tokens_per_image if isinstance(takes, ImageInput) else sequence_length


def misfit_of_parts(model: FamilySpec, data: SourceSpec, training: TrainingSpec) -> Unfit | None:
    """Return the first rule that ties parts of a spec together and is broken, or None."""
    try:
        data = data.with_model(model.files)
    except Unfit as unfit:
        return unfit
    if found := misfit(model.sizes.takes, data, training.sequence_length):
        return found
    if training.label_smoothing and model.sizes.task != "image_class":
        allowed = "0 with a model that predicts tokens; smoothed targets are for classes of images"
        return Unfit("training.label_smoothing", training.label_smoothing, allowed, "Remove training.label_smoothing.")
    return None if training.steps is None else training.schedule.misfit(training.steps)


def misfit_of_batch(batch: BatchDivision, parallelism: ParallelismSpec, resources: ResourceSpec) -> Unfit | None:
    """Return the first batch size that does not divide among the ranks, or an elastic job's fewest ranks; or None."""
    divided = [f"parallelism.{name}" for name in ("tensor", "context", "pipeline") if getattr(parallelism, name) > 1]
    readers = " / ".join(["resources.workers", *divided])
    share = f"{' · '.join(['global_batch_size', *divided])} / workers"
    if batch.global_batch_size % batch.num_data_ranks:
        return Unfit(
            "training.global_batch_size",
            batch.global_batch_size,
            f"a multiple of {readers}, {batch.num_data_ranks}",
            "Change training.global_batch_size or resources.workers.",
        )
    if batch.micro_batch_size and batch.rank_batch_size % batch.micro_batch_size == 0:
        return misfit_of_schedule(batch, parallelism) or misfit_of_elastic(resources, parallelism, batch)
    return Unfit(
        "training.micro_batch_size",
        batch.micro_batch_size,
        f"a divisor of {share}, {batch.rank_batch_size}",
        "Change training.micro_batch_size.",
    )


def misfit_of_adapter(adapter: AdapterSpec | None, model: FamilySpec, parallelism: ParallelismSpec) -> Unfit | None:
    """Return the first rule that a job with adapters breaks, or None."""
    if adapter is None:
        return None
    if model.files is None:
        allowed = "the folder of a saved model: adapters change a model that was trained before"
        return Unfit("model.path", None, allowed, "Set model.path, or remove adapter.")
    if parallelism.zero_stage:
        allowed = "0 with adapter: the optimizer's states of adapters are too small to divide among ranks"
        return Unfit("parallelism.zero_stage", parallelism.zero_stage, allowed, "Remove parallelism.zero_stage.")
    return None


def misfit_of_options(
    training: TrainingSpec,
    model: FamilySpec,
    precision: PrecisionSpec,
    adapter: AdapterSpec | None,
    parallelism: ParallelismSpec,
    batch: BatchDivision,
) -> Unfit | None:
    """Return the first rule that adapters, or an option of the training, break together with the rest of a job, or None."""
    unfit = misfit_of_adapter(adapter, model, parallelism) or misfit_of_average(training, adapter, parallelism)
    return unfit or misfit_of_memory(training, model, precision, parallelism.zero_stage, batch)


def misfit_of_average(training: TrainingSpec, adapter: AdapterSpec | None, parallelism: ParallelismSpec) -> Unfit | None:
    """Return the first rule that a moving average of the weights breaks, or None: every rank holds it whole."""
    if training.ema_decay is None or not (adapter or parallelism.zero_stage):
        return None
    allowed = "none with adapter or parallelism.zero_stage: the average is of all weights, whole on every rank"
    return Unfit("training.ema_decay", training.ema_decay, allowed, "Remove training.ema_decay.")


def misfit(takes: TokenInput | ImageInput, data: SourceSpec, sequence_length: int) -> Unfit | None:
    """Return the first rule that a model and its data break, or None. takes: what the model reads."""
    if takes.kind != data.gives:
        return Unfit(
            "data.source",
            data.source,
            f"a source of {takes.kind}, which the model reads",
            "Change data.source or model.family.",
        )
    if isinstance(takes, ImageInput):
        return _image_misfit(takes, data, sequence_length)
    return _token_misfit(takes, data, sequence_length)


def _image_misfit(takes: ImageInput, data: SourceSpec, sequence_length: int) -> Unfit | None:
    if isinstance(data, ImagesSpec) and data.is_varied and takes.num_channels not in (1, 3):
        allowed = "1 (grey) or 3 (RGB) with data.augmentation"
        return Unfit(
            "model.num_channels", takes.num_channels, allowed, "Change model.num_channels or remove data.augmentation."
        )
    if sequence_length != DEFAULT_SEQUENCE_LENGTH:  # the default says nothing: a stored spec has every field
        allowed = f"no training.sequence_length: the model takes {takes.tokens_per_image} tokens from an image"
        return Unfit("training.sequence_length", sequence_length, allowed, "Remove training.sequence_length.")
    return None


def _token_misfit(takes: TokenInput, data: SourceSpec, sequence_length: int) -> Unfit | None:
    longest, vocab_size = takes.max_sequence_length, takes.vocab_size
    if longest is not None and sequence_length > longest:
        return Unfit(
            "training.sequence_length",
            sequence_length,
            f"at most the model's max_sequence_length, {longest}",
            "Shorten training.sequence_length or raise model.max_sequence_length.",
        )
    if takes.mask_token is not None and data.has_targets:
        allowed = "a source whose tokens can be hidden, such as text or tokens: the model predicts masked tokens"
        return Unfit("data.source", data.source, allowed, "Change data.source, or train a model that predicts the next token.")
    if data.is_packed and takes.keeps_documents_apart is False:
        allowed = (
            "false: the model's attention does not end at a document's border, so documents in one row would see each other"
        )
        change = (
            "Remove data.packing, or train a model that keeps documents apart: gpt, llama, and most decoders of transformers."
        )
        return Unfit("data.packing", True, allowed, change)
    if vocab_size is not None and vocab_size < data.min_vocab_size:
        allowed = f"at least {data.min_vocab_size}, the vocabulary of source {data.source}"
        return Unfit("model.vocab_size", vocab_size, allowed, "Raise model.vocab_size.")
    if takes.mask_token is not None and data.min_vocab_size > 1 and takes.mask_token < data.min_vocab_size:
        allowed = f"at least {data.min_vocab_size}: source {data.source} has all tokens below"
        change = "Raise model.vocab_size, whose last token is the mask, or change model.mask_token."
        return Unfit("model.mask_token", takes.mask_token, allowed, change)
    return None
