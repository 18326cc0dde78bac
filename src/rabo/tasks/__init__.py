"""Tasks, one per file."""

from rabo.tasks.base import Setup, Task
from rabo.tasks.digits import DigitsTask
from rabo.tasks.quadratic import QuadraticTask

TASKS: dict[str, type[Task]] = {"quadratic": QuadraticTask, "digits": DigitsTask}

__all__ = ["TASKS", "Setup", "Task"]
