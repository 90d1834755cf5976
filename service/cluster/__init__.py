"""Where attempts run: the launcher protocol and its implementations."""
