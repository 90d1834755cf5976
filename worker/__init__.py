"""The runtime: one process per rank, and the library behind `from octet.worker import initialize`.

Importing this package loads nothing else. torch is loaded at the first use of a name below, so that the supervisor, which
is in this package too, starts without it.
"""

if __name__ != "octet.worker":
    raise ImportError("import octet.worker, not worker", name=__name__)


from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octet.worker.fp8.stored import exact_state_dict
    from octet.worker.integrations import (
        OctetArguments,
        carry_model_state,
        load_checkpoint,
        prepare_trainer,
        save_checkpoint,
    )
    from octet.worker.metrics.memory import memory_report
    from octet.worker.optim.offload import offload_optimizer
    from octet.worker.optim.release import release_gradients
    from octet.worker.parallel.parallelize import parallelize
    from octet.worker.prepare.attach_health import follow_optimizer, fp8_statistics
    from octet.worker.prepare.average import AveragedModel
    from octet.worker.prepare.blocks import compile_blocks
    from octet.worker.prepare.export_state_dict import plain_state_dict
    from octet.worker.prepare.initialize import initialize
    from octet.worker.prepare.memory_options import fuse_loss
    from octet.worker.prepare.residual_stream import keep_residual_in_bf16
    from octet.worker.prepare.saved_activations import keep_activations_in_fp8
    from octet.worker.pretrained import draw_model, export, load_pretrained

__all__ = [
    "AveragedModel",
    "OctetArguments",
    "carry_model_state",
    "compile_blocks",
    "draw_model",
    "exact_state_dict",
    "export",
    "follow_optimizer",
    "fp8_statistics",
    "fuse_loss",
    "initialize",
    "keep_activations_in_fp8",
    "keep_residual_in_bf16",
    "load_checkpoint",
    "load_pretrained",
    "memory_report",
    "offload_optimizer",
    "parallelize",
    "plain_state_dict",
    "prepare_trainer",
    "release_gradients",
    "save_checkpoint",
]

_HOME = {
    "AveragedModel": "octet.worker.prepare.average",
    "OctetArguments": "octet.worker.integrations",
    "carry_model_state": "octet.worker.integrations",
    "compile_blocks": "octet.worker.prepare.blocks",
    "draw_model": "octet.worker.pretrained",
    "exact_state_dict": "octet.worker.fp8.stored",
    "export": "octet.worker.pretrained",
    "follow_optimizer": "octet.worker.prepare.attach_health",
    "fp8_statistics": "octet.worker.prepare.attach_health",
    "fuse_loss": "octet.worker.prepare.memory_options",
    "initialize": "octet.worker.prepare.initialize",
    "keep_activations_in_fp8": "octet.worker.prepare.saved_activations",
    "keep_residual_in_bf16": "octet.worker.prepare.residual_stream",
    "load_checkpoint": "octet.worker.integrations",
    "load_pretrained": "octet.worker.pretrained",
    "memory_report": "octet.worker.metrics.memory",
    "offload_optimizer": "octet.worker.optim.offload",
    "parallelize": "octet.worker.parallel.parallelize",
    "plain_state_dict": "octet.worker.prepare.export_state_dict",
    "prepare_trainer": "octet.worker.integrations",
    "release_gradients": "octet.worker.optim.release",
    "save_checkpoint": "octet.worker.integrations",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octet.worker' has no attribute {name!r}; public: {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
