"""Runs on disk: options, records, checkpoints, live view, comparison and reports."""
