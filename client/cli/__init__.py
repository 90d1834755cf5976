"""The `octet` command: `main` runs it. `app` puts the commands together; each other module
holds a group of them, in its COMMANDS."""

from octet.client.cli.app import build_app, main

__all__ = ["build_app", "main"]
