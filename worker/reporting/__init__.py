"""A rank's line to the control plane: reports out, in order and each once; the lease and the desired state back."""
