"""The built wheel works on its own, outside the source tree."""

import json
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import urrl

ROOT = Path(__file__).resolve().parents[1]


def python(*arguments: object, cwd: Path, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def test_what_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        text = {name.split("/")[-1]: archive.read(name).decode() for name in held if ".dist-info/" in name}
    source = ROOT / "src"
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in (".py", ".html")}
    assert {name for name in held if ".dist-info/" not in name} == wanted
    assert "urrl = urrl.cli:main" in text["entry_points.txt"]
    assert f"Version: {urrl.__version__}\n" in text["METADATA"]
    assert "License-Expression: Apache-2.0" in text["METADATA"] and "Apache License" in text["LICENSE"]


def test_the_wheel_works_outside_the_source_tree(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = shlex.split("-m pip install --quiet --disable-pip-version-check --no-deps --no-index --target")
    python(*install, site, wheel, cwd=elsewhere)
    alone = {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    found = python("-c", "import urrl.methods.urrl as m; print(m.__file__)", cwd=elsewhere, **alone)
    assert Path(found.strip()).is_relative_to(site)
    assert python("-m", "urrl", "--version", cwd=elsewhere, **alone) == f"urrl {urrl.__version__}\n"
    assert (site / "bin" / "urrl").exists()

    arguments = shlex.split(
        "train --dataset digits --subset 100 --epochs 1 --set width=2 --threads 1 --quiet --out run"
    )
    assert "test accuracy" in python("-m", "urrl", *arguments, cwd=elsewhere, **alone)
    assert json.loads((elsewhere / "run" / "result.json").read_text())["epochs"] == 1
