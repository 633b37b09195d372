"""Sphinx's settings for this site: `make docs`. Pages are Markdown that GitHub shows too; warnings are errors."""

from __future__ import annotations

import hashlib
import pkgutil
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

import composer
import pearl

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
project = "PEARL"
version = release = pearl.__version__
project_copyright = "The PEARL contributors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
myst_heading_anchors = 4
exclude_patterns = ["_build"]
# Notebooks are kept without outputs; they run when the site is built, and again when they change.
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "notebooks")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
html_theme = "furo"
html_title = f"PEARL {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

# Annotations name classes without their modules, and two modules may have a class of that name.
suppress_warnings = ["ref.python"]
autodoc_type_aliases = {"ArrayLike": "ArrayLike"}
# Pages of the repository that are pages of the site: a link to one leads to the other.
PAGES = {"CONTRIBUTING": "contributing", "CHANGELOG": "changelog"}
OTHER_PAGES = "(other pages)"
# Only the site has this page.
API = "the API (on the site)"
# Two programs next to each other, as GitHub shows them.
SIDES = re.compile(
    r"<table><tr><th>(.+?)</th><th>(.+?)</th></tr><tr><td>\n(.+?)\n</td><td>\n(.+?)\n</td></tr></table>", re.DOTALL
)
MEMBERS = ("members", "undoc-members", "show-inheritance", "ignore-module-all")


def docstring_as_rst(lines: list[str]) -> list[str]:
    """Docstrings are Markdown: code in single backticks, and asterisks that mean themselves."""
    text = "\n".join(lines)
    parts = re.split(r"(`+[^`]+`+)", text)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = re.sub(r"\[([^\]]+)\]\((https?:[^)\s]+)\)", r"`\1 <\2>`__", part)
            parts[i] = re.sub(r"(?<!\\)([*|]|(?<=\w)_(?=\W|$))", r"\\\1", parts[i])
        else:
            # A letter right after the code would hide its end.
            parts[i] = f"``{part.strip('`')}``" + ("\\ " if re.match(r"[\w(]", parts[i + 1]) else "")
            if i and re.search(r"[\w)*]$", parts[i - 1]):
                parts[i] = "\\ " + parts[i]
    return "".join(parts).split("\n")


def modules_of(package: str) -> list[str]:
    """`package` and the public modules in it, all levels down."""
    path = Path(composer.__file__ if package.startswith("composer") else pearl.__file__).parent
    folder = path.joinpath(*package.split(".")[1:])
    if not folder.is_dir():
        return [package]
    found = [info.name for info in pkgutil.walk_packages([str(folder)], f"{package}.")]
    return [package, *(name for name in found if not any(part.startswith("_") for part in name.split(".")))]


def write_if_new(file: Path, text: str) -> None:
    """Write a page; one with the same text keeps its time, so that it is not read again."""
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")


def write_reference(app: Sphinx) -> None:
    """Write a page of the API for each package, and one for the modules next to them, into docs/api."""
    folder = HERE / "api"
    folder.mkdir(exist_ok=True)
    pages = {}
    for root in (pearl, composer):
        name = root.__name__
        found = pkgutil.iter_modules([str(Path(root.__file__ or "").parent)], f"{name}.")
        children = [info for info in found if not info.name.startswith(f"{name}._")]
        pages[name] = [name, *(info.name for info in children if not info.ispkg)]
        pages |= {info.name: modules_of(info.name) for info in children if info.ispkg}
    for name, modules in pages.items():
        text = f"{name}\n{'=' * len(name)}\n\n"
        for module in modules:
            if module != name:
                text += f"{module}\n{'-' * len(module)}\n\n"
            options = "".join(f"   :{option}:\n" for option in MEMBERS)
            text += f".. automodule:: {module}\n{options}\n"
        write_if_new(folder / f"{name}.rst", text)
    title = "The API, from the docstrings"
    tree = "".join(f"   {name}\n" for name in pages)
    index = f"{title}\n{'=' * len(title)}\n\n.. toctree::\n   :maxdepth: 1\n\n{tree}"
    write_if_new(folder / "index.rst", index)


def as_sides(table: re.Match[str]) -> str:
    """The two programs in a grid, which becomes one column on a narrow screen."""
    titles, programs = table.groups()[:2], table.groups()[2:]
    parts = "\n\n".join(
        f'<div>\n<p class="side-title">{title}</p>\n{program}\n</div>'
        for title, program in zip(titles, programs, strict=True)
    )
    return f'<div class="sides">\n\n{parts}\n\n</div>'


def other_pages(index: str) -> list[str]:
    """Pages in this folder that no toctree of the index names."""
    return sorted(page.stem for page in HERE.glob("*.md") if page.stem not in {*index.split(), "index"})


def setup(app: Sphinx) -> None:
    """Connect what this file defines. Pages are read again when it changes: their text depends on its functions."""
    text_of_this_file = Path(__file__).read_text(encoding="utf-8")
    app.add_config_value("read_by", hashlib.sha256(text_of_this_file.encode()).hexdigest(), "env")

    def docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
        lines[:] = docstring_as_rst(lines)

    def source(app: Sphinx, document: str, source: list[str]) -> None:
        text = re.sub(r'^<a id="([^"]+)"></a>$', r"(\1)=", source[0], flags=re.MULTILINE)
        for file, page in PAGES.items():
            text = re.sub(rf"\]\((?:\.\./)+{file}\.md", f"](/{page}.md", text)
        if document == "index":
            text = text.replace(OTHER_PAGES, "\n".join(other_pages(text))).replace(API, "[the API](api/index.rst)")
        text = SIDES.sub(as_sides, text)
        source[0] = text

    app.add_lexer("csv", TextLexer)
    app.connect("builder-inited", write_reference)
    # The index names pages that may be new.
    app.connect("env-get-outdated", lambda app, env, added, changed, removed: ["index"])
    app.connect("autodoc-process-docstring", docstring)
    app.connect("source-read", source)
