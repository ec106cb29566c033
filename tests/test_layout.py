"""The four folders at the top are sub-packages of staleflow: links, build file and wheel agree."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("clients", "configs", "protocols", "servers")


def test_each_room_is_a_committed_link() -> None:
    for room in ROOMS:
        link = ROOT / "staleflow" / room
        assert link.is_symlink()
        assert link.readlink() == Path("..") / room


def test_the_build_file_takes_each_room_from_its_real_folder() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert sorted(hatch["exclude"]) == [f"/staleflow/{room}" for room in ROOMS]
    assert hatch["targets"]["wheel"]["sources"] == {room: f"staleflow/{room}" for room in ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_refuses_its_bare_name(room: str) -> None:
    seen = subprocess.run(
        [sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert seen.returncode != 0
    assert f"import this package as staleflow.{room}" in seen.stderr


def test_the_source_distribution_holds_what_wheel_and_image_are_made_of_and_nothing_else(tmp_path: Path) -> None:
    """A source distribution with half of the checkout would pass for a whole one."""
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        inside = {name.partition("/")[2].split("/")[0] for name in packed.getnames()}
    copied = {
        source
        for line in (ROOT / "Containerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert copied >= {*ROOMS, "staleflow", "pyproject.toml"}
    assert inside == copied | {"Containerfile", ".dockerignore", ".gitignore", "CHANGELOG.md", "PKG-INFO"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    return next(out.glob("*.whl"))


@pytest.mark.xdist_group("wheel")
def test_the_wheel_holds_every_module_once_and_nothing_generic(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    pages = {f"staleflow/report/pages/{path.name}" for path in (ROOT / "staleflow" / "report" / "pages").iterdir()}
    assert len(pages) > 4
    assert pages <= set(names)
    assert {name.split("/")[0] for name in names} == {
        "staleflow",
        next(n for n in names if "dist-info" in n).split("/")[0],
    }
    for room in ROOMS:
        tracked = sorted(
            p.relative_to(ROOT).as_posix() for p in (ROOT / room).rglob("*") if p.suffix in {".py", ".toml"}
        )
        assert sorted(n.removeprefix("staleflow/") for n in names if n.startswith(f"staleflow/{room}/")) == tracked
    assert {"staleflow/examples/starter/config.toml", "staleflow/examples/starter/reward.py"} <= set(
        names
    )  # written by staleflow init


@pytest.mark.xdist_group("wheel")
def test_the_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import staleflow, staleflow.protocols.consistency.machine, staleflow.servers.scheduler.main\n"
        "from staleflow.cli import main\n"
        f"assert staleflow.__file__.startswith({str(site)!r}), staleflow.__file__\n"
        "main(['--help'])"
    )
    seen = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert seen.returncode == 0, seen.stderr
    assert "run" in seen.stdout
