"""Who else hears of the rounds of a run, one per file."""

from rabo.runs.writers.base import Start, Writer, following, numbers_of
from rabo.runs.writers.mlflow import MLflow
from rabo.runs.writers.tensorboard import TensorBoard

__all__ = ["MLflow", "Start", "TensorBoard", "Writer", "following", "numbers_of"]
