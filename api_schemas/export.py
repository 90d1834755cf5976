"""The export of a job: what a rank makes of a checkpoint for servers of models, and how far that is from what was trained."""

from typing import Literal

from pydantic import Field, field_validator

from octet.api_schemas.base import Contract, Timestamp, refusal
from octet.api_schemas.data.stores import check_url

EXPORT_NAME = r"step_[0-9]{10}_[a-z0-9-]{1,32}"
"""The name of an export's folder: the checkpoint's, and the form."""

EXPORT_PROGRESS = "export.progress"
"""The type of the event that says, once a minute, that an export goes on. It counts as progress of its attempt."""

Format = Literal["fp8", "bf16", "fp32"]
ExportLayout = Literal["compressed-tensors", "hf-fp8-block"]
Activations = Literal["none", "dynamic", "static"]


CALIBRATION_TOKENS = 8192


class ExportSpec(Contract):
    """A folder that transformers, vLLM and SGLang load, made of a job's checkpoint by the rank that reports."""

    format: Format = Field(
        default="bf16", description="fp8: converted layers as E4M3 codes with their scales, everything else in bf16"
    )
    layout: ExportLayout = Field(
        default="compressed-tensors",
        description="of fp8; hf-fp8-block: blocks of 128 × 128 with weight_scale_inv, as DeepSeek's and quant_method fp8",
    )
    activations: Activations = Field(
        default="none",
        description="of fp8; none: servers multiply in 16 bits; dynamic: they scale the inputs of these layers by token, and "
        "multiply in FP8; static: they scale all inputs of a layer by the number that calibration has found",
    )
    calibration_tokens: int = Field(
        default=CALIBRATION_TOKENS,
        ge=1,
        le=1_048_576,
        description="of static: training tokens that show how large inputs become",
    )
    when: Literal["end", "best", "every_checkpoint"] = Field(
        default="end",
        description="end: of the last checkpoint; best: of that with the lowest evaluation loss, at the end; every_checkpoint: "
        "as soon as each is complete, while the ranks wait",
    )
    target: str | None = Field(
        default=None,
        max_length=1024,
        description="a URL such as s3://bucket/prefix that the operator allows (OCTET_EXPORT_STORES): the export is also "
        "written to the folder {target}/{job id}/{name}; default: the job's own folder alone",
    )
    merge: bool = Field(default=False, description="of a job with adapter: the whole model with the adapters added to it")
    compared_tokens: int = Field(
        default=8192,
        ge=0,
        le=1_048_576,
        description="held-out tokens of the mismatch card, at most those of an evaluation; 0: no card, which is two networks "
        "in fp32 and 6 operations for each parameter and token less",
    )
    max_kl_divergence: float | None = Field(
        default=None,
        gt=0.0,
        description="an export whose divergence from the trainer's evaluation is larger, in nats per token, is not kept",
    )

    @field_validator("target")
    @classmethod
    def _target_is_url(cls, target: str | None) -> str | None:
        try:
            return None if target is None else check_url(target)
        except ValueError as error:
            raise refusal("", got=target, allowed=f"a URL: {error}", change="Change export.target.") from None

    @property
    def label(self) -> str:
        """The part of an export's name that says its form."""
        form = "-block" if self.layout == "hf-fp8-block" else ""
        scaled = "" if self.activations == "none" or form else f"-{self.activations}"
        return f"{self.format}{form}{scaled}{'-merged' if self.merge else ''}"


class Divergence(Contract):
    """The difference of two networks' logits on the same tokens."""

    kl_divergence: float = Field(description="mean over tokens, in nats, over the whole vocabulary: first from second")
    top1_agreement: float = Field(ge=0.0, le=1.0, description="share of tokens for which both have the same largest logit")
    largest_logit_difference: float = Field(ge=0.0)


class MismatchCard(Contract):
    """The distance of an export's files from what was trained, on held-out tokens. For images a token is an image.

    Adapters are compared with the model that they belong to in the dtype of its config.json.

    The files are read back, and computed as a server would: values in the dtype of config.json, inputs of layers in codes
    scaled as `activations` says.
    """

    num_tokens: int = Field(ge=1)
    tokens_sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the tokens or images that were compared")
    evaluation: Divergence = Field(description="of the trainer's evaluation from the files as served")
    weights: Divergence = Field(
        description="of the trained values from the written ones, both in the dtype of config.json, with inputs as they are"
    )


class Export(Contract):
    """A complete export. Its manifest lists each file's size and SHA-256; `sha256` is the hash of the manifest."""

    object: Literal["export"] = "export"
    id: str
    job_id: str
    attempt_id: str
    step: int
    name: str
    format: str = Field(description="fp8, bf16 or fp32; of adapters their dtype")
    layout: str
    activations: str
    created_at: Timestamp
    num_bytes: int
    sha256: str
    mismatch: MismatchCard | None = Field(description="null where compared_tokens is 0")
    address: str | None = Field(
        default=None, description="the URL of its folder in an object store; null if it is in the job's folder alone"
    )
