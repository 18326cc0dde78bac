"""What `python -m build` makes installs, and runs, where nothing of this repository is at hand.

The environment is new and empty but for the wheel. The packages that rabo depends on are those of
the environment of the tests, on a path after its own: rabo itself can only come from the wheel.
"""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(out.glob("rabo-*.tar.gz"))) == 1  # of which the wheel was made
    [made] = out.glob("rabo-*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True)
    where = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})["purelib"]
    dependencies = {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")}
    (Path(where) / "dependencies.pth").write_text("\n".join(sorted(dependencies)))
    return folder


def run(environment, folder, program, *words):
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [str(environment / "bin" / program), *words]
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=600)


def test_the_wheel_has_the_files_of_the_package_and_its_licence_alone(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    package = {
        path.relative_to(source).as_posix()
        for path in (source / "rabo").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "rabo/py.typed" in package
    assert package == {name for name in inside if ".dist-info/" not in name}  # and no tools
    about = {name.partition("/")[2] for name in inside if ".dist-info/" in name}
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= about


def test_the_demo_runs_from_the_wheel_alone(environment, tmp_path):
    found = run(environment, tmp_path, "python", "-c", "import rabo; print(rabo.__file__)")
    assert Path(found.stdout.strip()).is_relative_to(environment), found.stderr
    done = run(environment, tmp_path, "rabo", "demo", "--rounds", "1", "--out", "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "full model" in done.stdout
    assert (tmp_path / "runs" / "rabo" / "tasks.png").stat().st_size > 0
