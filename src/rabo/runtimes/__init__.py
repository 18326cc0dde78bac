"""Where clients run, one runtime per file."""

from rabo.runtimes.base import Local, Reply, RollCall, Runtime, Task, answers
from rabo.runtimes.grouped import Grouped
from rabo.runtimes.guarded import Fault, Guarded, Tolerance
from rabo.runtimes.in_process import InProcess
from rabo.runtimes.private import Privacy, Private, Protected
from rabo.runtimes.recorded import Recorded

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
