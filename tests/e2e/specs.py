"""Jobs of several ranks, made of one that trains for some seconds."""

from typing import Any

Spec = dict[str, Any]


def on_ranks(job: Spec, workers: int | dict[str, int], steps: int, checkpoint_every: int, **parts: Any) -> Spec:
    """A job on several ranks, which never evaluates. parts: of the spec, in the place of the job's own."""
    training = job["training"] | {"steps": steps, "checkpoint_every": checkpoint_every, "eval_every": 0}
    return job | {"training": training, "resources": {"workers": workers}} | parts
