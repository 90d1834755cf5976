"""Where attempts run: the `Launcher` protocol, a fake of it, and Ray."""
