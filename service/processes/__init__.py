"""The processes of the control plane, one module for each command: `octet serve`, `octet api`, `octet dispatcher`."""
