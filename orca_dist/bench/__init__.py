"""Measurements of the system's parts; what a person or docs/performance.md reads."""
