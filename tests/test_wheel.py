"""What pip installs: built from the source, it has all files, and trains where there is no source."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import mtgrpo

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
PROJECT = Path(__file__).resolve().parent.parent
BUILD = "import setuptools.build_meta as backend; backend.build_{}({!r})"
NAME = f"mtgrpo-{mtgrpo.__version__}-py3-none-any.whl"
QUICK = ["sft.steps=0", "trainer.steps=2", "rollout.prompts_per_step=2", "rollout.group_size=2"]
QUICK += ["eval.tasks=2", "eval.samples=1", "hydra.run.dir=run"]


def tracked() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    return [name for name in listing.stdout.split("\0") if name and (PROJECT / name).is_file()]


def build(kind: str, source: Path, out: Path) -> Path:
    """The file that pyproject.toml's backend makes of a source tree, which it litters."""
    out.mkdir()
    subprocess.run([sys.executable, "-c", BUILD.format(kind, str(out))], cwd=source, check=True, capture_output=True)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel of the source tree, and that of the sdist alone."""
    folder = tmp_path_factory.mktemp("built")
    for name in tracked():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_bytes((PROJECT / name).read_bytes())
    with tarfile.open(build("sdist", folder / "source", folder / "sdist")) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    assert (unpacked / "constraints.txt").is_file() and not (unpacked / "tests").exists()
    return build("wheel", folder / "source", folder / "wheel"), build("wheel", unpacked, folder / "again")


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_all_of_the_source_and_the_sdist_builds_the_same(built: tuple[Path, Path]) -> None:
    ours, again = map(contents, built)
    assert again == ours
    source = {name.removeprefix("src/"): (PROJECT / name).read_bytes() for name in tracked() if name[:4] == "src/"}
    info = f"mtgrpo-{mtgrpo.__version__}.dist-info/"
    assert {name: content for name, content in ours.items() if not name.startswith(info)} == source
    about = Parser().parsestr(ours[f"{info}METADATA"].decode())
    assert (about["Version"], about["License-Expression"]) == (mtgrpo.__version__, "Apache-2.0")


def test_the_wheel_trains_where_there_is_no_source(built: tuple[Path, Path], tmp_path: Path) -> None:
    """In an environment of its own, beside the packages that are here; with an empty home, in another folder."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    where = {"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")}
    installed = Path(sysconfig.get_path("purelib", vars=where))
    # The name of a folder there adds what lies in it, but not what its own .pth files name: mtgrpo's source among it.
    (installed / "packages.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, str(built[0])], check=True, capture_output=True)
    elsewhere, home = tmp_path / "elsewhere", tmp_path / "home"
    elsewhere.mkdir()
    home.mkdir()
    variables = {"HOME": str(home), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def run(*words: str, program: str = "mtgrpo") -> str:
        command = [str(python.with_name(program)), *words]
        done = subprocess.run(command, cwd=elsewhere, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    imported = run("-c", "import mtgrpo, hydra_plugins.mtgrpo_launcher as l; print(mtgrpo, l)", program="python")
    assert imported.count(f"{tmp_path}/venv/lib/") == 2
    assert run("--version") == f"mtgrpo {mtgrpo.__version__}\n"
    assert run("help").startswith(f"mtgrpo {mtgrpo.__version__}: GRPO")
    assert "Everything that training needs is here." in run("doctor")
    assert "usage: mtgrpo data" in run("data", "--help")
    assert "held-out success" in run("train", *QUICK)
    run("view", "run", "--out", "page")
    assert (elsewhere / "page/index.html").is_file() and (elsewhere / "page/vendor").is_dir()
    run("export", "run/checkpoints/step_000002", "--to", "hf", "--out", "model")
    assert {"model.safetensors", "chat_template.jinja", "chat.py", "README.md"} <= set(os.listdir(elsewhere / "model"))
    assert "no fault found" in run("train", "recipe=calculator", "model.name=model", "--dry-run")
    (installed / "hydra_plugins/others.py").write_text("")
    bundle = "import mtgrpo.launch.bundle as b, pathlib; pathlib.Path(b.WHEEL).write_bytes(b.build_wheel())"
    run("-c", bundle, program="python")
    sent, ours = ({n: c for n, c in contents(w).items() if "dist-info" not in n} for w in (elsewhere / NAME, built[0]))
    assert sent == ours, "a job gets what was installed, of mtgrpo alone"
