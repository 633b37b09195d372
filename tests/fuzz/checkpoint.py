"""Fuzz the checkpoint reader with libFuzzer: `make fuzz`, or `python tests/fuzz/checkpoint.py --help`.

Inputs that are found to break it are kept as crash-* in the folder of findings; once mended, they go into
tests/fuzz/corpus/, which the tests replay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris

sys.path.insert(0, str(Path(__file__).parent.parent))
with atheris.instrument_imports(include=["fuzz", "pearl", "numpy.lib", "numpy._core._internal", "safetensors", "json"]):
    from fuzz.checkpoint_property import SEPARATOR, check
    from fuzz.checkpoint_seeds import write_seeds

MAX_INPUT = 16_384  # bytes
VALUES = (
    None,
    True,
    -1,
    0,
    2,
    255,
    2**32,
    2**63,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    "",
    "1",
    "fifo",
    [],
    {},
    [1],
)


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Change one file of the input, or one value of its manifest: most changes elsewhere end at its syntax."""
    chance = random.Random(seed)
    parts = data.split(SEPARATOR)
    at = chance.randrange(len(parts))
    name, line_feed, content = parts[at].partition(b"\n")
    if chance.random() < 0.1 or not line_feed:
        return bytes(atheris.Mutate(data, max_size))
    room = max_size - len(data) + len(content)
    if room <= 0:
        return data[:max_size]
    changed = _with_another_value(content, chance) if name == b"manifest.json" and chance.random() < 0.8 else None
    if changed is None or len(changed) > room:
        changed = bytes(atheris.Mutate(content, room))
    parts[at] = name + line_feed + changed
    return SEPARATOR.join(parts)


def _with_another_value(manifest: bytes, chance: random.Random) -> bytes | None:
    try:
        content = json.loads(manifest)
        node: Any = content
        while True:
            key = chance.choice(list(node))
            if not isinstance(node[key], dict) or not node[key] or chance.random() < 0.1:
                break
            node = node[key]
        if chance.random() < 0.1:
            del node[key]
        else:
            node[key] = chance.choice(VALUES)
        return json.dumps(content).encode()
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="how long; default %(default)s")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="corpus and findings; %(default)s")
    options = parser.parse_args()
    here, folder = Path(__file__).parent, options.folder
    write_seeds(folder / "corpus")
    (folder / "findings").mkdir(exist_ok=True)
    memory = Path("/dev/shm")  # for files that live for a millisecond
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as workspace:
        arguments = [
            f"-max_total_time={options.seconds}",
            f"-max_len={MAX_INPUT}",
            f"-artifact_prefix={folder / 'findings'}/",
            f"-dict={here / 'checkpoint.dict'}",
            "-timeout=10",
            "-rss_limit_mb=4096",
            "-print_final_stats=1",
        ]
        corpora = [str(folder / "corpus"), str(here / "corpus")]
        number = itertools.count()

        def run(data: bytes) -> None:
            check(data, Path(workspace), traced=next(number) % 8 == 0)  # slow, and tracing keeps some memory each time

        atheris.Setup([sys.argv[0], *arguments, *corpora], run, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
