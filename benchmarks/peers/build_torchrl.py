"""Build TorchRL's C++ extension from the sources in its wheel, if the wheel's own does not load.

The wheels are linked against a torch whose symbols differ from those of the CPU build pinned here. Run in the
environment of the peers: `python -m benchmarks.peers.build_torchrl`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path


def loads() -> bool:
    """Whether the extension can be imported; a child process tries, so that this one can load the new build."""
    return subprocess.run([sys.executable, "-c", "import torchrl._torchrl"], capture_output=True).returncode == 0


def main() -> None:
    found = importlib.util.find_spec("torchrl")
    if found is None or found.origin is None:
        sys.exit("TorchRL is not installed: its rows will state that.")
    if loads():
        print("TorchRL's extension loads already.")
        return
    from torch.utils import cpp_extension

    package = Path(found.origin).parent
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja
        cpp_extension.load(
            "_torchrl",
            [str(package / "csrc" / name) for name in ("pybind.cpp", "utils.cpp")],
            extra_cflags=["-O3"],
            build_directory=scratch,
        )
        built = Path(scratch) / "_torchrl.so"
        shutil.copyfile(built, package / f"_torchrl{sysconfig.get_config_var('EXT_SUFFIX')}")
    if not loads():
        sys.exit("TorchRL's extension was built, but still does not load.")
    print("TorchRL's extension was built from its sources.")


if __name__ == "__main__":
    main()
