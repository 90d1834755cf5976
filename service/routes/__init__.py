"""Thin HTTP handlers, one file for each part of the API."""
