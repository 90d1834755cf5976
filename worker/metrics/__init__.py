"""A rank's metrics: the table, memory and device readings, and the export to Prometheus."""
