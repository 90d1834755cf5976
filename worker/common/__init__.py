"""Parts that every room of the runtime may use: errors, the resolved configuration, wrappers, tensors without memory."""
