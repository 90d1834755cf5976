"""Measurements of a job by its rank 0, while it runs: size, memory and worst layers (`GET /v1/jobs/{id}/measurements`)."""

from typing import Annotated, Literal

from pydantic import Field

from octet.api_schemas.base import Contract, Timestamp

MAX_LAYERS = 10

Bytes = Annotated[int, Field(ge=0, le=2**53)]
MemoryClass = Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]


class MemoryBytes(Contract):
    """Bytes of live tensors on rank 0 at the end of the first backward pass, by class."""

    held: dict[MemoryClass, Bytes] = Field(max_length=16, description="as octet.worker.memory_report counts them")
    fp32: dict[MemoryClass, Bytes] = Field(
        max_length=16, description="the same values in fp32: weights, gradients and the optimizer's states; no master weights"
    )
    host: Bytes = Field(description="states in host memory, by training.offload_optimizer; 0 on cpu")
    peak: Bytes | None = Field(description="device peak up to then on cuda; null on cpu")


class LayerHealth(Contract):
    """A sample of how well FP8 holds one operand of one layer, in the last step that took one."""

    layer: str = Field(max_length=512)
    operand: Literal["input", "weight", "grad_output"]
    step: int = Field(ge=0, le=2**53)
    amax: float | None = Field(description="null if not finite, as are the others")
    dequant_scale: float | None = Field(description="value = codes × dequant_scale; the largest, where there are several")
    overflow_ratio: float | None = Field(description="share of elements clamped to the format's maximum")
    underflow_ratio: float | None = Field(description="share of non-zero elements that became zero")
    sqnr_db: float | None = Field(description="signal to quantization noise, in decibels")


class Measurements(Contract):
    """The last of everything that the job's rank 0 measured. `memory` and `layers` are null before the first."""

    object: Literal["measurements"] = "measurements"
    job_id: str
    attempt_id: str
    at: Timestamp
    step: int
    num_parameters: int
    num_layers_converted: int
    num_layers_filtered: int = Field(description="converted layers in bf16 because FP8 gains nothing there")
    num_layers_skipped: int
    memory: MemoryBytes | None
    layers: tuple[LayerHealth, ...] | None = Field(
        max_length=MAX_LAYERS, description="the worst by sqnr_db, worst first; null where nothing is sampled"
    )
