"""Optional packages: the core runs without them, and an error names the extra to install."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rabo.cli import app

EXTRAS = (
    *("sklearn", "scipy", "pooch", "PIL", "matplotlib", "plotly", "jinja2", "psutil"),
    *("flwr", "tensorboard", "mlflow"),
)
COMMANDS = {
    ("run", "digits"): {"sklearn": "tasks"},
    ("run", "few-shot"): {"PIL": "tasks"},
    ("run", "few-shot", "--dataset", "omniglot"): {"pooch": "tasks"},
    ("run", "loss-tuning", "--dataset", "cifar10"): {"pooch": "tasks"},
    ("compare", "quadratic"): {"scipy": "compare", "matplotlib": "compare"},
    ("run", "quadratic", "--tensorboard"): {"tensorboard": "tensorboard"},
    ("run", "quadratic", "--mlflow"): {"mlflow": "mlflow"},
}
CASES = [(c, package, extra) for c, needs in COMMANDS.items() for package, extra in needs.items()]


def hide(monkeypatch, package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize(("command", "package", "extra"), CASES)
def test_a_missing_package_is_one_line_that_names_the_extra(
    tmp_path, monkeypatch, command, package, extra
):
    hide(monkeypatch, package)
    done = CliRunner().invoke(app, [*command, "--rounds", "1", "--out", str(tmp_path / "run")])
    assert done.exit_code == 1
    [line] = done.stderr.splitlines()
    assert package in line
    assert f"pip install 'rabo[{extra}]'" in line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


CORE_ALONE = """
import sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(",")))
import rabo
from rabo.cli import app
app()
"""


def test_the_core_runs_without_any_extra(tmp_path):
    command = ["run", "quadratic", "--rounds", "2", "--out", str(tmp_path / "run")]
    program = [sys.executable, "-c", CORE_ALONE, ",".join(EXTRAS)]
    done = subprocess.run([*program, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_command_line_imports_no_extra():
    code = f"import sys, rabo.cli; print(*{{*{EXTRAS!r}}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
