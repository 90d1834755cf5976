"""A server that has started keeps the objects made until then out of garbage collections."""

import gc

from octet.service.processes.startup import freeze_what_is_there


def test_a_full_collection_leaves_out_what_the_start_made() -> None:
    try:
        freeze_what_is_there()
        assert gc.get_freeze_count() > 10_000  # the modules alone
        assert len(gc.get_objects()) < 0.1 * gc.get_freeze_count()
    finally:
        gc.unfreeze()
