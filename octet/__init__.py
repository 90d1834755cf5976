"""Octet's public names: the training library (`initialize`) and the client of its service (`Client`).

    from octet import Client, initialize

Importing this package loads neither torch nor httpx: each name is fetched from its home at its first use. The library needs the
extra `worker` (PyTorch), the client the extra `client` (httpx).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client import Client
    from worker import (
        AveragedModel,
        OctetArguments,
        carry_model_state,
        compile_blocks,
        export,
        follow_optimizer,
        fp8_statistics,
        fuse_loss,
        initialize,
        keep_activations_in_fp8,
        keep_residual_in_bf16,
        load_pretrained,
        memory_report,
        offload_optimizer,
        parallelize,
        plain_state_dict,
        prepare_trainer,
        release_gradients,
    )

__all__ = [
    "AveragedModel",
    "Client",
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

_HOME = {name: "client" if name == "Client" else "worker" for name in __all__}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octet' has no attribute {name!r}; public: {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
