"""What a rank measures of itself: the table of its metrics, memory, its device, and how Prometheus reads them."""
