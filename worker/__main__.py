"""Run one rank without a service: `python -m octet.worker job.yaml`, or under torchrun."""

from octet.worker.rank.main import main

raise SystemExit(main())
