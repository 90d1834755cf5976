"""What Prometheus gets from the control plane: its own metrics, each job's last values, and where the ranks are."""
