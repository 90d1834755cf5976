"""The public package `octet`: its names, and where they come from. test_architecture.py has what importing it loads."""

import pytest

import octet
from octet import client, worker


def test_the_public_names() -> None:
    assert octet.__all__ == [
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
    assert dir(octet) == octet.__all__


def test_each_name_comes_from_its_own_package() -> None:
    assert octet.Client is client.Client
    for name in set(octet.__all__) - {"Client"}:
        assert getattr(octet, name) is getattr(worker, name)


def test_an_unknown_name_is_refused_with_the_public_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'initialise'; public: AveragedModel, Client, OctetArguments"):
        octet.initialise  # noqa: B018  only the access is tested
