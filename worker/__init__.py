"""The runtime: one process per rank, and the library behind `from worker import initialize`.

Importing this package loads nothing else. torch is loaded at the first use of a name below, so that the supervisor, which
is in this package too, starts without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.blocks import compile_blocks
    from worker.following import follow_optimizer, fp8_statistics
    from worker.integrations import OctetArguments, carry_model_state, prepare_trainer
    from worker.metrics.memory import memory_report
    from worker.optim.average import AveragedModel
    from worker.optim.offload import offload_optimizer
    from worker.optim.release import release_gradients
    from worker.parallel.parallelize import parallelize
    from worker.plain import plain_state_dict
    from worker.prepare import initialize
    from worker.pretrained import export, load_pretrained
    from worker.residual_stream import keep_residual_in_bf16
    from worker.saved_activations import keep_activations_in_fp8
    from worker.savings import fuse_loss

__all__ = [
    "AveragedModel",
    "OctetArguments",
    "carry_model_state",
    "compile_blocks",
    "export",
    "follow_optimizer",
    "fp8_statistics",
    "fuse_loss",
    "initialize",
    "keep_activations_in_fp8",
    "keep_residual_in_bf16",
    "load_pretrained",
    "memory_report",
    "offload_optimizer",
    "parallelize",
    "plain_state_dict",
    "prepare_trainer",
    "release_gradients",
]

_HOME = {
    "AveragedModel": "worker.optim.average",
    "OctetArguments": "worker.integrations",
    "carry_model_state": "worker.integrations",
    "compile_blocks": "worker.blocks",
    "export": "worker.pretrained",
    "follow_optimizer": "worker.following",
    "fp8_statistics": "worker.following",
    "fuse_loss": "worker.savings",
    "initialize": "worker.prepare",
    "keep_activations_in_fp8": "worker.saved_activations",
    "keep_residual_in_bf16": "worker.residual_stream",
    "load_pretrained": "worker.pretrained",
    "memory_report": "worker.metrics.memory",
    "offload_optimizer": "worker.optim.offload",
    "parallelize": "worker.parallel.parallelize",
    "plain_state_dict": "worker.plain",
    "prepare_trainer": "worker.integrations",
    "release_gradients": "worker.optim.release",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'worker' has no attribute {name!r}; public: {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
