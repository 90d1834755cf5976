"""A rank's connection to the control plane: sends reports in order and once each; receives lease and desired state."""
