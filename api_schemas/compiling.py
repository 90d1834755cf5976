"""Which jobs may compile the blocks of their model (`training.compile`), and why others do not."""

from api_schemas.data import Unfit
from api_schemas.resources import ParallelismSpec
from api_schemas.training import TrainingSpec


def why_not_compiled(parallelism: ParallelismSpec) -> str | None:
    """Say why the ranks of a job run its blocks without torch.compile; None: nothing in the way of ranks forbids it."""
    if (degree := parallelism.context) > 1:
        return f"with parallelism.context {degree} torch cannot trace the attention to keys that ranks gather"
    if parallelism.sequence:
        return "with parallelism.sequence layers take FP8 codes from exchanges that torch cannot trace"
    return None


def misfit_of_compiling(parallelism: ParallelismSpec, training: TrainingSpec) -> Unfit | None:
    """Return why a job that insists on compiled blocks cannot have them, or None."""
    reason = why_not_compiled(parallelism)
    if training.compile != "on" or reason is None:
        return None
    field = "parallelism.context" if parallelism.context > 1 else "parallelism.sequence"
    return Unfit("training.compile", "on", f"off or auto: {reason}", f"Remove training.compile, or {field}.")
