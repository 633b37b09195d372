"""Where code of a run came from, by name, and how it is imported again.

Only names are kept, and nothing is unpickled. A module is imported from the file from which the run's program imported
it, which a warning names, and never from the run's folder: whoever sends a run folder must not have his code run.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pearl.error_place import described
from pearl.errors import PolicyError

_PACKAGES = {"site-packages", "dist-packages"}

logger = logging.getLogger("pearl.policy")


@dataclass(frozen=True)
class CodeSource:
    """A class or function at the top level of a module. `file` is absolute; empty for an installed module."""

    module: str
    name: str
    file: str

    @classmethod
    def of(cls, made: Any) -> CodeSource:
        """Where a class or function is, under the name by which a program imports it."""
        module, file = module_of(made)
        return cls(module, made.__qualname__, "" if file is None or _is_installed(module, file) else str(file))

    @property
    def text(self) -> str:
        """Module and name, as errors say them."""
        return f"{self.module}.{self.name}"

    def load(self, what: str, base: type, run: Path, advice: str) -> Any:
        """The class or function; PolicyError, ending with `advice`, if it cannot be imported or is not trusted.

        From an installed module, only a class derived from `base` is taken: a run folder from somebody else could name
        any function of any package, with any arguments. `what` says in errors what it is, such as "wrapper".
        """
        module = self._module(what, run, advice)
        found = getattr(module, self.name, None)
        if found is None:
            raise PolicyError(f"{getattr(module, '__file__', module)} has no {what} {self.name} any more. {advice}")
        if isinstance(found, type) and issubclass(found, base):
            return found
        stated = getattr(module, "__file__", None)
        installed = not self.file or stated is None or _is_installed(self.module, Path(stated).resolve())
        if installed or not callable(found) or module_of(found)[0] != self.module:
            raise PolicyError(
                f"The run names {self.text} as its {what}. Of installed packages, only classes derived from "
                f"{base.__module__.partition('.')[0]}.{base.__name__} are used, and of other modules what they define: "
                f"a folder of somebody else could name any function. {advice}"
            )
        return found

    def _module(self, what: str, run: Path, advice: str) -> Any:
        if self.file:
            return import_from_file(self.module, self.file, f"{what} {self.name}", run, advice)
        try:
            return importlib.import_module(self.module)
        except Exception as error:  # whatever a module does at import
            raise PolicyError(
                f"The module {self.module!r} of the {what} {self.name} cannot be imported: {described(error)}. {advice}"
            ) from error


def module_of(made: Any) -> tuple[str, Path | None]:
    """The name by which the module of a class or function can be imported, and its file if it has one."""
    try:
        file = Path(inspect.getfile(made)).resolve()
    except (TypeError, OSError):
        file = None
    module = str(made.__module__)
    if module == "__main__" and file is not None:
        module = file.stem
    return module, file


def import_from_file(name: str, stated: str, what: str, run: Path, advice: str) -> Any:
    """The module `name` from the file `stated`; PolicyError, ending with `advice`, if it cannot be imported from there.

    `what` says what the module has, such as "trainer class Mine". `run` is the folder of the run, or a file in it.
    """
    which, file = f"The module {name!r} of the {what}", Path(stated)
    loaded = sys.modules.get(name)
    if loaded is None and _is_main(file):
        loaded = sys.modules["__main__"]
    if loaded is not None:
        if not _is_from(loaded, file):
            raise PolicyError(
                f"{which} was {stated or 'in no file'} in the run; here {name!r} is "
                f"{getattr(loaded, '__file__', 'a module without a file')}. {advice}"
            )
        return loaded
    if not stated or not file.is_absolute() or not file.is_file():
        raise PolicyError(f"{which} was in {stated or 'no file'}, which is not there. {advice}")
    folder = run.resolve() if run.is_dir() else run.resolve().parent
    if file.resolve().is_relative_to(folder):
        raise PolicyError(
            f"{which} is in the folder of the run itself, {file}. Code that comes with a run is not executed. {advice}"
        )
    root = _root_of(name, file)
    if root is None:
        raise PolicyError(f"{which} cannot be in {file}, which has another name. {advice}")
    logger.warning("Importing %s for the %s, as the program of the run did.", file, what)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        importlib.invalidate_caches()
        module = importlib.import_module(name)
    except Exception as error:  # whatever the user's module does at import
        raise PolicyError(f"{which} cannot be imported: {described(error)}. {advice}") from error
    if not _is_from(module, file):
        raise PolicyError(f"{which} was imported from {getattr(module, '__file__', None)} instead of {file}. {advice}")
    return module


def _is_installed(module: str, file: Path) -> bool:
    """Whether a module belongs to a package, to Python or to PEARL, not to the user's own files."""
    library = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    own = module.partition(".")[0] in ("pearl", "composer")
    return own or bool(_PACKAGES.intersection(file.parts)) or any(file.is_relative_to(folder) for folder in library)


def _is_main(file: Path) -> bool:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return main is not None and Path(main).resolve() == file.resolve()


def _is_from(module: object, file: Path) -> bool:
    stated = getattr(module, "__file__", None)
    return stated is not None and Path(stated).resolve() == file.resolve()


def _root_of(module: str, file: Path) -> Path | None:
    """The folder from which `module` is imported if it is in `file`; None if it cannot be."""
    parts = module.split(".")
    if file.stem == "__init__":
        parts.append("__init__")
    if len(file.parts) <= len(parts) or [*file.parts[-len(parts) : -1], file.stem] != parts or file.suffix != ".py":
        return None
    return file.parents[len(parts) - 1]
