"""Which jobs compile the blocks of their model (`training.compile: auto`): those whose ranks run each block whole."""

from api_schemas.layout import Layout


def why_not_compiled(layout: Layout) -> str | None:
    """Say why a job with `training.compile: auto` does not compile its blocks; None: they are compiled on CUDA."""
    return None
