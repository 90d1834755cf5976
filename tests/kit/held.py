"""Hold offences that exist today, so that a rule can be checked before the last of them is gone.

`held.json` has a number for each offender. A check passes while no number grows and no offender is new. `make held` lowers the
numbers to those of today and refuses to raise a rule's total, so it also follows files that were renamed.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

HELD = Path(__file__).with_name("held.json")


def grown(rule: str, counts: Mapping[str, int]) -> dict[str, str]:
    """Return the offenders of `rule` that are new or worse than held.json has them, each with both numbers."""
    held: dict[str, dict[str, int]] = json.loads(HELD.read_text()) if HELD.exists() else {}
    allowed = held.get(rule, {})
    worse = {name: f"{count}; held: {allowed.get(name, 0)}" for name, count in counts.items() if count > allowed.get(name, 0)}
    lower = sum(counts.values()) <= sum(allowed.values())
    if os.environ.get("OCTET_UPDATE_HELD") == "1" and (lower or rule not in held):
        held[rule] = {name: count for name, count in sorted(counts.items()) if count}
        HELD.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n")
        return {}
    return worse
