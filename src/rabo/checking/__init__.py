"""Check a bilevel problem before it is trained."""

from rabo.checking.report import Comparison, Finding, ProblemCheck, ProblemCheckError, Spectrum
from rabo.checking.run import check

__all__ = [
    "Comparison",
    "Finding",
    "ProblemCheck",
    "ProblemCheckError",
    "Spectrum",
    "check",
]
