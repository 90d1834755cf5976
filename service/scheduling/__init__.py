"""Decides which jobs run next, and says why the others wait."""
