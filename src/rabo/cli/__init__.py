"""The command line."""

from rabo.cli.main import app

__all__ = ["app"]
