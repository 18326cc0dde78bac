"""One page about runs, for any browser and without a network."""

from rabo.runs.report.page import write_report

__all__ = ["write_report"]
