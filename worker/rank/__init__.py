"""Run one rank: its process from the order to the last report, and the supervisor that starts it."""
