"""What a rank measures: its table of metrics, its memory and its device, and their export to Prometheus."""
