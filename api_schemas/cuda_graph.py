"""Which jobs train by CUDA graphs (`training.cuda_graph`): those with nothing that a replay cannot repeat."""

from api_schemas.models import ModelSpec
from api_schemas.training import TrainingSpec

GRAPHED_FAMILIES = ("gpt", "llama", "roberta", "deit", "swin")
"""Their passes read no value of the device, copy no numbers to it, and have one shape (tests/worker/test_step_graph.py)."""


def why_not_recorded(training: TrainingSpec, model: ModelSpec, num_ranks: int) -> str | None:
    """Say why the steps of a job with `training.cuda_graph: auto` run without CUDA graphs; None: they are recorded on CUDA."""
    if num_ranks > 1:
        return f"{num_ranks} ranks exchange gradients, for which the host waits"
    if model.family not in GRAPHED_FAMILIES:
        return f"passes of model.family {model.family} may wait for the device; known: {', '.join(GRAPHED_FAMILIES)}"
    if training.activation_checkpointing != "none":
        return f"activation_checkpointing {training.activation_checkpointing} sets the state of random numbers inside a pass"
    if training.gradient_release:
        return "gradient_release steps parameters inside the backward pass"
    if training.offload_optimizer:
        return "offload_optimizer copies states between the host and the device in streams of its own"
    return None
