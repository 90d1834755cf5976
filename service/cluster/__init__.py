"""Run attempts: the `Launcher` protocol, a fake of it, and Ray."""
