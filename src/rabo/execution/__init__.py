"""Where clients run, one runtime per file."""

from rabo.exchange.client import ClientContext
from rabo.exchange.request import Answer, Reply, Request
from rabo.exchange.work import RollCall, Runtime, Work
from rabo.execution.grouped import Grouped
from rabo.execution.guarded import Fault, Guarded, Tolerance
from rabo.execution.in_process import InProcess
from rabo.execution.private import Privacy, Private, Protected
from rabo.execution.recorded import Recorded

RUNTIMES = {"plain": InProcess, "recorded": Recorded, "grouped": Grouped}

__all__ = [
    "RUNTIMES",
    "Answer",
    "ClientContext",
    "Fault",
    "Grouped",
    "Guarded",
    "InProcess",
    "Privacy",
    "Private",
    "Protected",
    "Recorded",
    "Reply",
    "Request",
    "RollCall",
    "Runtime",
    "Tolerance",
    "Work",
]
