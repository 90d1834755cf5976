"""Who runs next, and why the others wait."""
