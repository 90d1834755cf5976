"""Octet's public names: the training library (`initialize`) and the client of its service (`Client`).

    from octet import Client, initialize

Importing this package loads neither torch nor httpx: each name is fetched from its home at its first use. The library
needs the extra `worker`, which brings PyTorch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octet.client import Client
    from octet.worker import (
        AveragedModel,
        OctetArguments,
        carry_model_state,
        compile_blocks,
        draw_model,
        exact_state_dict,
        export,
        follow_optimizer,
        fp8_statistics,
        fuse_loss,
        initialize,
        keep_activations_in_fp8,
        keep_residual_in_bf16,
        load_checkpoint,
        load_pretrained,
        memory_report,
        offload_optimizer,
        parallelize,
        plain_state_dict,
        prepare_trainer,
        release_gradients,
        save_checkpoint,
    )

__all__ = [
    "AveragedModel",
    "Client",
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

_HOME = {name: "octet.client" if name == "Client" else "octet.worker" for name in __all__}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octet' has no attribute {name!r}; public: {', '.join(__all__)}")
    from importlib import import_module

    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "octet":
            raise
        message = f"octet.{name} needs {error.name}; install it with: pip install 'octet-fp8[worker]'"
        raise ModuleNotFoundError(message, name=error.name) from error


def __dir__() -> list[str]:
    return __all__
