"""Cases: the AdamW step of a GPT of 1e9 parameters at each level, Lion's at O2, and other projects' steps on the same tensors.

The bytes that a step must move are counted from the existing tensors: weights and states are read and written once,
gradients are read once, and an E4M3 weight with a master weight is only written.
"""

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.networks import Way, build_gpt, prepare
from benchmarks.gpu.report import Row, Target
from benchmarks.gpu.session import Case, Session, missing
from benchmarks.gpu.timing import Timing
from octet.api_schemas.models.gpt import gpt_sizes
from octet.worker import initialize, memory_report
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.optim import LowBitLion

SIZES = gpt_sizes(2048, 20, 16, 256, 2048)
SMALL = gpt_sizes(64, 2, 2, 256, 64)
SHARE, FASTER = Target(0.80, 0.90), Target(2.0, 2.4, style=".2f")
TORCH = "torch AdamW, fused, fp32"
PEERS = {  # by the name of their row: package, module and class
    "torchao AdamWFp8": ("torchao", "torchao.optim", "AdamWFp8"),
    "bitsandbytes AdamW8bit": ("bitsandbytes", "bitsandbytes.optim", "AdamW8bit"),
}
LION = "Lion O2"
LEVELS = ("O2", "O3-split", "O1", "O3", "O2-8bit", "O3-split-8bit")


def optimizer_cases(session: Session) -> list[Case]:
    """Return the cases, ours before peers that compile for each shape and may use up the time; each is compared with ours."""
    taken: dict[str, Timing] = {}
    return [
        Case(TORCH, partial(_step_of_torch, session, taken)),
        *(Case(f"AdamW {level}", partial(_step_of_level, session, level, taken), expected_s=5) for level in LEVELS),
        Case(LION, partial(_step_of_lion, session, taken), expected_s=5),
        *(Case(name, partial(_step_of_peer, session, name, taken), expected_s=20) for name in PEERS),
    ]


def _step_of_torch(session: Session, taken: dict[str, Timing]) -> Iterator[Row]:
    model = build_gpt(SMALL if session.smoke else SIZES, session.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=session.device.type == "cuda")
    yield _time(session, TORCH, model, optimizer, taken)


def _step_of_peer(session: Session, name: str, taken: dict[str, Timing]) -> Iterator[Row]:
    package, module, class_name = PEERS[name]
    try:
        optimizer_class = getattr(importlib.import_module(module), class_name)
    except ImportError:
        yield missing(name, package)
        return
    if session.device.type != "cuda":
        yield Row(name, "not run", note="it needs a GPU")
        return
    model = build_gpt(SMALL if session.smoke else SIZES, session.device)
    yield _time(session, name, model, optimizer_class(model.parameters()), taken)
    for level in LEVELS:
        yield from _against(level, name, taken)


def _step_of_level(session: Session, level: str, taken: dict[str, Timing]) -> Iterator[Row]:
    model, optimizer = prepare(build_gpt(SMALL if session.smoke else SIZES, session.device), Way(level, level))
    yield _time(session, f"AdamW {level}", model, optimizer, taken)
    yield from _against(level, TORCH, taken)


def _against(level: str, peer: str, taken: dict[str, Timing]) -> Iterator[Row]:
    """Compare a level's step with a peer's, if both were timed."""
    own, other = taken.get(f"AdamW {level}"), taken.get(peer)
    if own and other:
        target = FASTER if level == "O2" and peer != "bitsandbytes AdamW8bit" else None
        yield Row(f"AdamW {level} against {peer}", str(own), f"theirs {other}", other.median_s / own.median_s, target)


def _step_of_lion(session: Session, taken: dict[str, Timing]) -> Iterator[Row]:
    model: Any = build_gpt(SMALL if session.smoke else SIZES, session.device)
    model, optimizer = initialize(model, LowBitLion(model.parameters()), "O2", statistics_every=0)
    assert optimizer is not None
    yield _time(session, LION, model, optimizer, taken)
    if TORCH in taken:
        yield Row(f"{LION} against {TORCH}", str(taken[LION]), str(taken[TORCH]), taken[TORCH].median_s / taken[LION].median_s)


def _time(session: Session, name: str, model: Any, optimizer: torch.optim.Optimizer, taken: dict[str, Timing]) -> Row:
    _give_gradients(model)
    optimizer.step()  # creates the states
    timing = taken[name] = session.timer.measure(lambda _: optimizer.step())
    num_bytes, num_parameters = _bytes_to_move(model, optimizer), model.num_parameters
    return Row(
        name,
        f"{timing}, {num_bytes / timing.median_s / 1e12:.2f} TB/s",
        f"copy {session.ceilings.copy_bytes_per_s / 1e12:.2f} TB/s",
        session.ceilings.share_of_copy(num_bytes, timing),
        SHARE if name == "AdamW O2" else None,
        f"{num_parameters:,} parameters, {num_bytes / num_parameters:.2f} bytes each to move; the host takes "
        f"{timing.host_s * 1e3:.2f} ms",
    )


def _give_gradients(model: torch.nn.Module) -> None:
    converted = {layer.weight for layer in model.modules() if isinstance(layer, Float8Linear)}
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, device=parameter.device) * 1e-3
        parameter.grad = Float8Gradient.quantize(gradient, RoundingPosition(0, 0)) if parameter in converted else gradient


def _bytes_to_move(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    parameters = list(model.parameters())
    gradients = sum(
        gradient.codes.nbytes if isinstance(gradient, Float8Gradient) else gradient.nbytes
        for gradient in (parameter.grad for parameter in parameters)
        if gradient is not None
    )
    held = sum(memory_report(model, optimizer).values()) - gradients
    mastered = [parameter for parameter in parameters if "master_weights" in optimizer.state.get(parameter, {})]
    return 2 * held + gradients - sum(parameter.nbytes for parameter in mastered)
