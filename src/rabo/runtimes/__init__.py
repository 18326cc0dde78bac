"""Where clients run, one runtime per file."""

from rabo.runtimes.base import Local, Reply, RollCall, Runtime, Task
from rabo.runtimes.in_process import InProcess
from rabo.runtimes.recorded import Recorded

RUNTIMES = {"plain": InProcess, "recorded": Recorded}

__all__ = ["RUNTIMES", "InProcess", "Local", "Recorded", "Reply", "RollCall", "Runtime", "Task"]
