"""The tutorial runs as it stands, block by block, and ends with what it promises; only the training is shorter here."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import call
from urrl.tables import read_table

TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorial.md"
FEWER = ["--threads", "1", "--epochs", "8", "--set", "width=8"]  # ten times fewer operations than the tutorial's own


def blocks():
    return re.findall(r"```(python|sh)\n(.*?)```", TUTORIAL.read_text(), re.S)


def test_the_tutorial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = ""
    for language, text in blocks():
        if language == "python":
            done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            printed += done.stdout
            continue
        for line in text.strip().splitlines():
            words = shlex.split(line)
            assert words[0] == "urrl"
            if words[1] == "train" and "--epochs" not in words:
                words += FEWER
            result = call(*words[1:])
            assert result.code == 0, (line, result.err)
    before, after = (float(share) for share in re.findall(r"([\d.]+)%", printed))
    assert after > before + 3 and before < 90
    assert len(read_table(Path("audit/cleaned.csv"))) == 1797
    for name in (
        "audit/index.html",
        "predictions.csv",
        "model.pt2",
        "runs/again/result.json",
        "runs/table/result.json",
    ):
        assert Path(name).stat().st_size > 0


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", TUTORIAL.read_text()))
def test_links(link):
    assert (TUTORIAL.parent / link).exists()
