"""The documentation: links lead somewhere, snippets run, and what follows from the code is what the code says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import reference

import composer.composing
from composer.spec_file import TABLES
from pearl.algorithms import ALGORITHMS
from pearl.backends import AUTO, learners
from pearl.runtime.options import parse_options

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
WRITTEN = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts and "api" not in page.parts)
PAGES = [*WRITTEN, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md"))]
WITH_SNIPPETS = [page for page in WRITTEN if page.parent.name == "algorithms" or page.stem in ("coming_from", "guides")]
SNIPPETS = [(DOCS / "algorithms" / f"{name.lower()}.md", f"{name.lower()}_example.py") for name in ALGORITHMS]
SNIPPETS += [(DOCS / "coming_from.md", f"from_{name}.py") for name in ("sb3_dqn", "sb3_ppo", "cleanrl", "rllib")]


class Reached(Exception):
    """Composing got as far as looking at the machine."""


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """The text of a page without its code."""
    text = re.sub(r"^ *(```+).*?^ *\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]+`", "code", text)


def anchors(page: Path) -> set[str]:
    """What `#...` may name in a page: its headings as GitHub and MyST name them, and its own anchors."""
    text = re.sub(r"^ *(```+).*?^ *\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return {*found, *re.findall(r'<a id="([^"]+)">', text)}


def python_blocks(page: Path) -> Iterator[str]:
    for indent, block in re.findall(
        r"^( *)```python\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        yield re.sub(rf"^{indent}", "", block, flags=re.MULTILINE)


def write_snippets(page: Path, folder: Path) -> None:
    for block in python_blocks(page):
        if name := re.match(r"# (\w+\.py)\n", block):
            (folder / name[1]).write_text(block, encoding="utf-8")


def broken_links(page: Path, root: Path = ROOT) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(\s*((?!\w+:)[^)\s]+)\s*\)", prose(page)):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        is_there = target.is_relative_to(root) and target.exists()
        if not is_there or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files_and_headings_that_exist(page):
    assert broken_links(page) == []


def test_the_link_check_finds_broken_links(tmp_path):
    headings = '# A `name`, twice\n\n## Part\n\n## Part\n\n<a id="own"></a>\n\n```\n# no heading\n```\n'
    (tmp_path / "other.md").write_text(headings, encoding="utf-8")
    assert anchors(tmp_path / "other.md") == {"a-name-twice", "part", "part-1", "own"}
    page = tmp_path / "page.md"
    good = "[a](other.md#part-1) [b](other.md) [c](https://example.org/x) `[d](gone.md)` [e](#own)\n\n# Own\n"
    page.write_text(good, encoding="utf-8")
    assert broken_links(page, tmp_path) == []
    page.write_text(good + "[f](gone.md) [g](other.md#part-2) [h](#other) [i](../outside.md)\n", encoding="utf-8")
    assert broken_links(page, tmp_path) == ["gone.md", "other.md#part-2", "#other", "../outside.md"]


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_pages_name_no_file_that_is_gone(page):
    text = page.read_text(encoding="utf-8")
    named_files = re.findall(
        r"`((?:pearl|composer|kernels|runtime_templates|tests|examples|tools)/[\w/.]+\.\w+)`", text
    )
    assert [file for file in named_files if not (ROOT / file).exists()] == []


def missing_classes(text: str) -> list[str]:
    """Classes that the text names by module, such as pearl.algorithms.Trainer, and that their module does not name."""
    missing = []
    for module, name in re.findall(r"(?<![\w./])((?:pearl|composer)(?:\.[a-z_]\w*)+)\.([A-Z][a-z]\w*)", text):
        files = [ROOT / f"{module.replace('.', '/')}{end}" for end in (".py", ".pyi", "/__init__.py")]
        known = [file.read_text(encoding="utf-8") for file in files if file.exists()]
        if known and not any(re.search(rf"\b{name}\b", content) for content in known):
            missing.append(f"{module}.{name}")
    return missing


def test_messages_and_pages_name_classes_where_they_can_be_imported():
    assert missing_classes("Derive from pearl.algorithms.Trainer, not pearl.algorithms.Trained.") == [
        "pearl.algorithms.Trained"
    ]
    sources = [path for folder in ("pearl", "composer") for path in (ROOT / folder).rglob("*.py")]
    named_wrong = {named(path): missing_classes(path.read_text(encoding="utf-8")) for path in (*WRITTEN, *sources)}
    assert {path: names for path, names in named_wrong.items() if names} == {}


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=named)
def test_snippets_are_python(page):
    for block in python_blocks(page):
        compile(block, named(page), "exec")


def test_notebooks_are_kept_without_outputs_and_lead_to_pages_that_exist():
    """`make docs` runs them, and fails if one does."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    notebooks = sorted((DOCS / "notebooks").glob("*.ipynb"))
    assert len(notebooks) >= 3
    for notebook in notebooks:
        assert f"(notebooks/{notebook.name})" in index
        assert f"\nnotebooks/{notebook.stem}\n" in index
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells), notebook
        text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for link in re.findall(r"\]\(([^)#:]+)", text):
            assert (notebook.parent / link).is_file(), f"{notebook.name}: {link}"


def test_what_follows_from_the_code_is_up_to_date():
    stale = [named(page) for page, text in reference.pages().items() if page.read_text(encoding="utf-8") != text]
    assert stale == [], "run `python .ci/tools/reference.py`"


def test_pages_on_ppo_tell_the_measured_seconds_until_cartpole_is_solved():
    rows = json.loads((ROOT / "benchmarks" / "results" / "solve_time.json").read_text(encoding="utf-8"))["rows"]
    case, peer = "CartPole-v1 time to solve: ppo_cartpole, composed program", "Stable-Baselines3 PPO, RL Zoo settings"
    (row,) = (row for row in rows if (row["case"], row["peer"]) == (case, peer))
    ours, theirs = f"{row['ours']:.1f}", f"{row['theirs']:.1f}"
    (line,) = re.findall(r"seconds until solved.*", (DOCS / "algorithms" / "ppo.md").read_text(encoding="utf-8"))
    assert line.endswith(f"| {ours} | {theirs} |")
    guide = " ".join((DOCS / "on_policy.md").read_text(encoding="utf-8").split())
    assert re.search(rf"median of {ours} s by .* after {theirs} s by Stable-Baselines3's PPO", guide)


def test_the_guide_lists_every_option_of_programs(capsys):
    with pytest.raises(SystemExit):
        parse_options("A run.", timesteps=1, run_dir="runs/x", arguments=["--help"])
    options = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    listed = set(re.findall(r"--[a-z-]+", "".join(rows_of_guide("`--"))))
    assert len(options) > 20
    assert {re.sub("^--plot$", "--no-plot", option) for option in options} <= listed


def test_the_guide_lists_every_key_of_composition_files():
    rows = {re.findall(r"\[(\w+)\]", row)[0]: row for row in rows_of_guide("`[")}
    assert set(rows) == set(TABLES)
    for table, keys in TABLES.items():
        if table != "replay":  # whose keys, the arguments of set_replay, have a table of their own
            assert [key for key in keys if f"`{key}" not in rows[table]] == [], table
    assert all(f'"{name}"' in rows["trainer"] for name in (AUTO, *learners()))


def rows_of_guide(beginning: str) -> list[str]:
    """The rows of tables in the guide whose first cell begins so."""
    guide = (DOCS / "getting_started.md").read_text(encoding="utf-8")
    return [line for line in guide.splitlines() if line.startswith(f"| {beginning}")]


def test_each_algorithm_has_a_page_that_the_index_names():
    index = (DOCS / "algorithms" / "index.md").read_text(encoding="utf-8")
    for name in ALGORITHMS:
        assert f"[{name}]({name.lower()}.md)" in index
        assert f"\n{name.lower()}\n" in index


@pytest.mark.parametrize(("page", "script"), SNIPPETS, ids=lambda value: value if isinstance(value, str) else "")
def test_compositions_in_snippets_are_accepted(page, script, tmp_path, monkeypatch):
    # Spaces, settings and minibatches are checked before the machine is looked at.
    write_snippets(page, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def reached(*arguments: object, **options: object) -> None:
        raise Reached

    monkeypatch.setattr(composer.composing, "discover", reached)
    code = compile((tmp_path / script).read_text(encoding="utf-8"), script, "exec")
    with pytest.raises(Reached):
        exec(code, {"__name__": script})


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("page", "script"), SNIPPETS, ids=lambda value: value if isinstance(value, str) else "")
def test_snippets_compose_programs_that_train(page, script, tmp_path):
    write_snippets(page, tmp_path)
    environment = {**os.environ, "PEARL_BUDGET_S": "0"}  # the times of the parts decide

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(script)
    program = re.search(r'"(\w+_program\.py)"', (tmp_path / script).read_text(encoding="utf-8"))
    assert program is not None
    options = ("--timesteps", "8192", "--until-return", "none", "--eval-episodes", "2")
    assert "Last weights:" in run(program[1], *options)
    if script == "from_sb3_dqn.py":
        run("use_policy.py")
