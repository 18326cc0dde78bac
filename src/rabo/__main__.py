"""`python -m rabo` is `rabo`."""

from rabo.cli import app

app()
