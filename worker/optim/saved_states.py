"""Check the saved states that an optimizer is given to continue from."""

from collections.abc import Mapping
from typing import Any

from worker.optim.codecs import Codec, Parts
from worker.optim.rule import Rule


def check_states(saved: Mapping[str, Any], rule: Rule) -> None:
    """Reject the states of another rule."""
    names = [name for name in saved if name not in ("step", "master_weights")]
    if set(names) != set(rule.state_codecs):
        raise ValueError(
            f"the saved states are {', '.join(names)}; allowed: {', '.join(rule.state_codecs)}, the states of {rule.name}. "
            "Continue with the optimizer that saved them, or start this one without them."
        )


def check_parts(name: str, parts: Parts, codec: Codec) -> None:
    """Reject a saved state that consists of other parts; the kernel would otherwise read a null pointer."""
    if set(parts) != set(codec.parts):
        raise ValueError(
            f"the saved {name} consists of {', '.join(parts)}; allowed: {', '.join(codec.parts)}. Another version of Octet "
            "saved it: finish the run with that version, or start a new optimizer from the saved weights."
        )
