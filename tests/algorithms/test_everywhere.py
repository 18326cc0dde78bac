"""Every algorithm runs on every task, or says why it makes no sense there."""

import pytest

from rabo.algorithms import ALGORITHMS
from rabo.runs.experiment import Experiment, run

SMALL = {
    "few-shot": {"backbone": "conv4", "channels": "4", "tasks": 2, "queries": 2, "test_tasks": 2},
    "loss-tuning": {"dataset": "digits", "width": 4},
    "digits": {"width": 8},
    "quadratic": {},
}


def experiment(task, name, **options):
    return Experiment(
        task=task,
        task_options={**SMALL[task], **options},
        algorithm=name,
        clients=2,
        capacities="1,1/2",
        rounds=2,
        evaluate_every=2,
    )


@pytest.mark.parametrize("task", SMALL)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_runs_or_says_why_not(name, task, tmp_path):
    kind = ALGORITHMS[name]
    if kind.is_episodic and task != "few-shot":
        with pytest.raises(ValueError, match="few-shot"):
            run(experiment(task, name), tmp_path / "run")
        return
    options = {}
    if kind.needs_one_y and task == "few-shot":
        with pytest.raises(ValueError, match="one y"):
            run(experiment(task, name), tmp_path / "private")
        options["heads"] = "shared"
    result = run(experiment(task, name, **options), tmp_path / "run")
    assert len(result.history) == 2
    assert result.cost.multiply_adds > 0
    assert result.cost.bytes_up > 0
