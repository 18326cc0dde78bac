"""Faster kernels for some layers, and the choice between them and torch's."""
