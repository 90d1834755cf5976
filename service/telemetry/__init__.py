"""Serve metrics to Prometheus: the control plane's own, each job's last values, and where the ranks are."""
