"""scripts/setup.sh and the .venv it finds, with a Python that only pretends to install."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

pytestmark = pytest.mark.real  # for their length

PROJECT = Path(__file__).resolve().parent.parent
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = f"""#!/bin/sh
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *pip*) echo "$@" >> pip.log ;;
    *torch*) echo 2.13.0 ;;
    *sys.executable*) echo "$0" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    for name in ("scripts/setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(PROJECT / name, project / name)
    executable(tmp_path / "bin" / "python3", PYTHON)
    return project


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def setup(project: Path) -> tuple[int, str]:
    """The exit code and everything printed."""
    path = f"{project.parent / 'bin'}:/usr/bin:/bin"
    command = ["bash", str(project / "scripts" / "setup.sh"), "run"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": path})
    return done.returncode, done.stdout + done.stderr


def installs(project: Path) -> int:
    log = project / "pip.log"
    return log.read_text().count("install -e") + log.read_text().count("install --quiet -e") if log.exists() else 0


def theirs(project: Path, python: str = PYTHON) -> Path:
    """A .venv that somebody else made, with something of theirs in it."""
    executable(project / ".venv" / "bin" / "python", python)
    keepsake = project / ".venv" / "keepsake"
    keepsake.touch()
    return keepsake


def test_conda_gets_a_python_that_is_supported_and_the_versions_that_are_tried() -> None:
    wanted = yaml.safe_load((PROJECT / "environment.yml").read_text())["dependencies"]
    supported = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert SpecifierSet(supported).contains(wanted[0].removeprefix("python="))
    assert wanted[1:] == ["pip", {"pip": ["-c constraints.txt", "-e ."]}]


def test_a_venv_is_made_once(place: Path) -> None:
    for _ in range(2):
        code, said = setup(place)
        assert code == 0, said
    assert installs(place) == 1


@pytest.mark.parametrize("damage", ["interrupted", "moved", "no interpreter"])
def test_a_broken_venv_of_its_own_is_made_again(damage: str, place: Path) -> None:
    assert setup(place)[0] == 0
    leftover = place / ".venv" / "leftover"
    leftover.touch()
    if damage == "interrupted":
        (place / ".venv" / ".installing").touch()
    elif damage == "moved":
        place = place.rename(place.with_name("elsewhere"))
        leftover = place / ".venv" / "leftover"
    else:
        (place / ".venv" / "bin" / "python").unlink()
    code, said = setup(place)
    assert code == 0 and "making it again" in said, said
    assert not leftover.exists()
    assert installs(place) == 2


def test_a_making_that_broke_off_is_made_again(place: Path) -> None:
    python = place.parent / "bin" / "python3"
    executable(python, PYTHON.replace("cp ", "exit 9; cp "))
    assert setup(place)[0] == 9
    executable(python, PYTHON)
    code, said = setup(place)
    assert code == 0 and installs(place) == 1, said


def test_a_working_venv_of_somebody_else_is_used(place: Path) -> None:
    keepsake = theirs(place)
    executable(place.parent / "bin" / "python3", "#!/bin/sh\nexit 1\n")  # the Python of .venv is enough
    for _ in range(2):
        code, said = setup(place)
        assert code == 0, said
    assert installs(place) == 1
    (finished,) = (place / ".venv").glob(".setup-*")
    finished.rename(finished.with_name(".installing"))  # an install that broke off is taken up again
    assert setup(place)[0] == 0
    assert installs(place) == 2
    assert keepsake.exists()


@pytest.mark.parametrize("damage", ["no pip", "no interpreter", "another Python", "moved"])
def test_a_venv_of_somebody_else_that_does_not_work_is_left_alone(damage: str, place: Path) -> None:
    keepsake = theirs(place)
    if damage == "moved":
        assert setup(place)[0] == 0
        place = place.rename(place.with_name("elsewhere"))
        keepsake = place / ".venv" / "keepsake"
    elif damage == "no pip":
        theirs(place, PYTHON.replace('*pip*) echo "$@" >> pip.log', "*pip*) exit 1"))
    elif damage == "another Python":
        theirs(place, "#!/bin/sh\necho 3.10\n")
    else:
        (place / ".venv" / "bin" / "python").unlink()
    before = installs(place)
    code, said = setup(place)
    assert code == 1
    assert f"not made by this script, and it was moved or is no working Python {VERSION} with pip" in said
    assert keepsake.exists()
    assert installs(place) == before
