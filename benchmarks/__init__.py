"""Benchmarks of rabo: one question per file. `python -m benchmarks` lists them."""
