"""HTTP handlers: thin, one file for each part of the API."""
