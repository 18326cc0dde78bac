"""Where clients run, one runtime per file."""

from rabo.exchange.work import Local, Reply, RollCall, Runtime, Task, answers
from rabo.execution.grouped import Grouped
from rabo.execution.guarded import Fault, Guarded, Tolerance
from rabo.execution.in_process import InProcess
from rabo.execution.private import Privacy, Private, Protected
from rabo.execution.recorded import Recorded

RUNTIMES = {"plain": InProcess, "recorded": Recorded, "grouped": Grouped}

__all__ = [
    "RUNTIMES",
    "Fault",
    "Grouped",
    "Guarded",
    "InProcess",
    "Local",
    "Privacy",
    "Private",
    "Protected",
    "Recorded",
    "Reply",
    "RollCall",
    "Runtime",
    "Task",
    "Tolerance",
    "answers",
]
