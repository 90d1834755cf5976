"""Ranks that start with torch imported: a template process on each node imports it once, and forks a process per rank.

Importing torch and the trainer takes four CPU seconds; forking takes milliseconds. A forked process serves one attempt and
ends. It is used only where environment, user and search path are those of the process that asks; whoever gets none runs
the rank itself. `take` and `start` are for the rank's actor, `template` is the process.
"""

from octet.worker.rank.warm.process import Ending, ProcessLost, WarmProcess, start, take

__all__ = ["Ending", "ProcessLost", "WarmProcess", "start", "take"]
