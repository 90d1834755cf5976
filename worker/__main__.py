"""Run one rank without a service: `python -m octet.worker job.yaml`, or under torchrun."""

import logging
import os
import sys

from octet.worker.rank.main import main

status = main()
# The work is done and saved. Two ranks whose interpreters are taken down with torch's threads end in an abort
# ("terminate called without an active exception") once in 60 runs on two busy cores, and torchrun reports a failed job.
logging.shutdown()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
