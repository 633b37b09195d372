"""The README's commands and code, as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def run(folder: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_twelve_lines_compose_a_program_that_trains(tmp_path, monkeypatch):
    for block in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name is not None, block
        (tmp_path / name[1]).write_text(block, encoding="utf-8")
    run(tmp_path, "-m", "pearl", "devices", "--no-measure")
    # SYCL devices, where there are any, take most of the time; test_sycl_composer composes for them.
    devices = tmp_path / "devices.csv"
    header, host, *_ = devices.read_text(encoding="utf-8").splitlines(keepends=True)
    devices.write_text(header + host, encoding="utf-8")
    (tmp_path / "connections.csv").write_text("source,target,latency_us,bandwidth_gbps\n", encoding="utf-8")
    monkeypatch.delenv("PEARL_BUDGET_S")  # as for a user: a torch Learner that is far too slow is not measured
    run(tmp_path, "compose.py")
    options = ("--timesteps", "1500", "--until-return", "none", "--eval-episodes", "2", "--plot")
    output = run(tmp_path, "cartpole_runtime.py", *options)
    for named in ("Last weights:", "learning_curve.png"):
        assert named in output


def test_every_command_exists():
    commands = [line.split("#")[0].split() for block in blocks("bash") for line in block.splitlines() if line.strip()]
    targets = {command[1] for command in commands if command[0] == "make"}
    assert targets == {"quickstart", "test"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    help_text = run(ROOT, "-m", "pearl", "--help")
    for command in commands:
        if command[0] == "pearl":
            assert re.search(rf"\b{command[1]}\b", help_text)
            named = [word for word in command[2:] if word.startswith("examples/") and "/runs/" not in word]
            assert all((ROOT / word).exists() for word in named)


def test_links_to_files_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert len(links) > 5
    for link in links:
        assert (ROOT / link).exists(), link
