"""Ray as a cluster: the launcher, the dispatcher's node and the embedded cluster. Nothing else in the service knows Ray."""
