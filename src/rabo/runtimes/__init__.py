"""Where clients run, one runtime per file."""

from rabo.runtimes.base import Local, Reply, Runtime, Task
from rabo.runtimes.in_process import InProcess

__all__ = ["InProcess", "Local", "Reply", "Runtime", "Task"]
