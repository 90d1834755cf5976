"""Train one job on one rank: the loop, its steps, log, reports and progress."""
