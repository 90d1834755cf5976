"""Train at a precision level with transformers' `Trainer`, or a trainer derived from it, as TRL's `SFTTrainer` is.

    arguments, training = HfArgumentParser((OctetArguments, TrainingArguments)).parse_args_into_dataclasses()
    trainer = Trainer(model, training, train_dataset=dataset)
    prepare_trainer(trainer, arguments)
    trainer.train(resume_from_checkpoint=...)

The trainer's checkpoints hold plain weights, which `from_pretrained` loads. `optimizer.pt` holds what else a resume needs to be
equal bit for bit. Under torchrun all ranks train one model by `octet.parallelize`, at every level, in the place of DDP.
transformers is not imported here: whoever has a trainer has it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from octet.api_schemas.levels import LEVELS
from octet.api_schemas.precision import LevelName, PrecisionSpec
from octet.worker.fp8.convert import ConversionReport
from octet.worker.integrations.carry import carry_model_state
from octet.worker.parallel.parallelize import parallelize
from octet.worker.prepare.convert import share_rounding
from octet.worker.prepare.initialize import initialize
from octet.worker.prepare.options import read_options

DDP_OPTIONS = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")


@dataclass
class OctetArguments:
    """Options of a command line that `HfArgumentParser` reads next to `TrainingArguments`: fields of `PrecisionSpec`."""

    octet_level: LevelName = field(
        default="O2", metadata={"help": "the precision level; `octet levels` says what each stores in what"}
    )
    octet_include: str = field(
        default="*", metadata={"help": "linear layers to convert: globs of their names, separated by commas"}
    )
    octet_exclude: str = field(
        default="", metadata={"help": "linear layers to leave in bf16: globs of their names, separated by commas"}
    )
    octet_convert_heads: bool = field(default=False, metadata={"help": "convert classifiers and language model heads too"})
    octet_skip_first_layers: int = field(default=0, metadata={"help": "linear layers left in bf16 at the model's start"})
    octet_skip_last_layers: int = field(default=0, metadata={"help": "linear layers left in bf16 at the model's end"})
    octet_strict: bool = field(default=False, metadata={"help": "fail if a layer would be skipped that no option excludes"})
    octet_norms: Literal["fp32", "bf16"] = field(
        default="fp32", metadata={"help": "dtype of the weights and outputs of LayerNorm and RMSNorm"}
    )
    octet_gradient_accumulation: Literal["fp8", "fp32"] = field(
        default="fp8", metadata={"help": "format of gradients between micro-batches"}
    )

    def spec(self) -> PrecisionSpec:
        """Return the precision that the options describe. ValueError for what does not fit the level."""
        globs = {"include": _globs(self.octet_include), "exclude": _globs(self.octet_exclude)}
        others = ("convert_heads", "skip_first_layers", "skip_last_layers", "strict", "norms", "gradient_accumulation")
        return read_options(self.octet_level, globs | {name: getattr(self, f"octet_{name}") for name in others})


def prepare_trainer(trainer: Any, arguments: OctetArguments | None = None) -> None:
    """Convert the model of a `Trainer` and its optimizer, before `trainer.train()`.

    `trainer.model.octet_report` lists what was done.

    arguments: leave them out if model and optimizer are from `initialize`. The optimizer is the trainer's own, or made from its
    `TrainingArguments`; random rounding takes their seed. All ranks call it together. Raises ValueError, before the model
    is changed, for arguments of the trainer that do not go with the level, and as `initialize` does.
    """
    report = getattr(trainer.model, "octet_report", None)
    if isinstance(report, ConversionReport):
        if arguments is not None:
            raise ValueError(
                "got OctetArguments for a model that is initialized; allowed: one of them. Leave out the arguments, or do "
                "not call initialize."
            )
        _check_trainer(trainer, report.level)
        _check_given_optimizer(trainer)
    elif arguments is None:
        raise ValueError("got no OctetArguments, and the model is not initialized. Pass OctetArguments(octet_level=...).")
    else:
        _convert(trainer, arguments.spec())
    if trainer.args.world_size > 1:
        _parallelize(trainer)
    carry_model_state(trainer.model, trainer.optimizer)


def _convert(trainer: Any, precision: PrecisionSpec) -> None:
    _check_trainer(trainer, precision.level)
    given = trainer.optimizer
    if given is None:
        trainer.create_optimizer()
    try:
        model, optimizer = initialize(trainer.model, trainer.optimizer, precision, seed=trainer.args.seed)
    except ValueError:
        trainer.optimizer = given
        raise
    trainer.model = trainer.model_wrapped = model
    trainer.optimizer = optimizer


def _parallelize(trainer: Any) -> None:
    """Exchange gradients in the level's format, and let Accelerate prepare the model without DDP around it."""
    args, accelerator = trainer.args, trainer.accelerator
    share_rounding(trainer.model, args.process_index, args.world_size)
    parallel = parallelize(trainer.model, trainer.optimizer)
    accelerator.no_sync = lambda model: parallel.no_sync()
    accelerator.prepare_model = partial(type(accelerator).prepare_model, accelerator, evaluation_mode=True)


def _check_given_optimizer(trainer: Any) -> None:
    """Refuse a trainer that would make an optimizer of its own for codes."""
    known = set(trainer.model.parameters())
    optimizer = trainer.optimizer
    if (
        not isinstance(optimizer, torch.optim.Optimizer)
        or not {parameter for group in optimizer.param_groups for parameter in group["params"]} <= known
    ):
        raise ValueError(
            "the trainer's model is from octet.initialize and its optimizer is not; allowed: both from one call. Pass "
            "optimizers=(optimizer, None) to the trainer."
        )


class _Conflict(NamedTuple):
    """An argument that does not go with a level. got: None or false if it does not stand in the way."""

    option: str
    got: Any
    allowed: str
    change: str


def _check_trainer(trainer: Any, level: str) -> None:
    """Raise ValueError for an argument of the trainer that changes what the level computes or stores, by its name."""
    for option, got, allowed, change in (*_of_ranks(trainer), *_of_precision(trainer, level), *_of_model(trainer)):
        if got:
            raise ValueError(f"{option} is {got!r} at level {level}; allowed: {allowed}. {change}")


def _of_ranks(trainer: Any) -> Iterator[_Conflict]:
    """Several ranks: codes are not values that DDP or FSDP could send or cut."""
    args, ours = trainer.args, "Leave it out: on several ranks the trainer exchanges gradients by octet.parallelize."
    yield _Conflict("deepspeed", trainer.is_deepspeed_enabled and (args.deepspeed or True), "None", ours)
    yield _Conflict("fsdp", args.fsdp or trainer.is_fsdp_enabled, "none", ours)
    yield _Conflict("parallelism_config", args.parallelism_config, "None", ours)
    yield _Conflict("n_gpu", args.n_gpu > 1 and args.n_gpu, "1", "Run one process per device, by torchrun.")
    for option in DDP_OPTIONS if args.world_size > 1 else ():
        got = getattr(args, option, None)
        yield _Conflict(option, None if got is None else f"{got}", "None", ours)


def _of_precision(trainer: Any, level: str) -> Iterator[_Conflict]:
    """Casts of others: the level decides what is computed in which format."""
    args, mode = trainer.args, trainer.accelerator.mixed_precision
    yield _Conflict("fp16", mode == "fp16", "False", "For products in fp16 choose octet_level fp16-amp.")
    if LEVELS[level].gemm in ("fp32", "fp16"):
        yield _Conflict("bf16", mode == "bf16", "False", "For products in bf16 choose octet_level bf16-amp.")
    yield _Conflict("mixed_precision", mode == "fp8" and mode, "no or bf16", "Accelerate would convert the model again.")
    for option in ("fp16_full_eval", "bf16_full_eval"):
        yield _Conflict(option, getattr(args, option), "False", "It casts the model for good. Evaluate as the level computes.")


def _of_model(trainer: Any) -> Iterator[_Conflict]:
    yield _Conflict("model_init", trainer.model_init, "None", "Each training would start from a plain model. Pass model.")
    adapters = getattr(trainer.model, "peft_config", None)
    merge = "Checkpoints of adapters leave out the converted base model. Merge adapters first, or train them in your own loop."
    yield _Conflict("peft_config", adapters, "None", merge)


def _globs(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
