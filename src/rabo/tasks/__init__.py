"""Tasks, one per file."""

from rabo.tasks.base import Setup, Task
from rabo.tasks.digits import DigitsTask
from rabo.tasks.few_shot import FewShotTask
from rabo.tasks.loss_tuning import LossTuningTask
from rabo.tasks.own import OwnTask
from rabo.tasks.quadratic import QuadraticTask

TASKS: dict[str, type[Task]] = {
    "few-shot": FewShotTask,
    "loss-tuning": LossTuningTask,
    "digits": DigitsTask,
    "quadratic": QuadraticTask,
    "own": OwnTask,
}

__all__ = ["TASKS", "Setup", "Task"]
