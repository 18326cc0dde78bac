"""Parts that several benchmarks share."""
