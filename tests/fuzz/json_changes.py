"""Changes to JSON documents, for tests that hold their readers to "as written, or refused"."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

ODD = st.sampled_from(
    (
        *(None, True, False, -1, 0, 1, 2, 255, 2**32, 2**63, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
        *("", "1", [], {}, [1], {"tuple": []}, {"tensor": "state/0/exp_avg_sq"}, {"mapping": [[1, 2]]}, [[1, 2]]),
    )
)


def change_json(data: st.DataObject, content: Any) -> None:
    """Replace, remove or add one value somewhere in it."""
    node: Any = content
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans() | st.just(True)):
            node = node[key]
            continue
        break
    action = data.draw(st.sampled_from(["replace", "replace", "replace", "remove", "double"]))
    if action == "replace":
        node[key] = json.loads(json.dumps(data.draw(ODD)))
    elif action == "remove":
        del node[key]
    elif isinstance(node, list):
        node.append(node[key])
    else:
        node[f"{key}x"] = node[key]
