"""Records what a torch module does: the graph of its operations, and the shape of every value."""

from __future__ import annotations

import torch
from torch import fx, nn

from pearl.algorithms.networks import Dropout, ScaleBytes


class _Tracer(fx.Tracer):
    """Does not trace into subclasses of layers, nor into modules that change the dtype or drop numbers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (nn.Linear, nn.Conv2d, ScaleBytes, Dropout)) or super().is_leaf_module(
            m, module_qualified_name
        )


class Recorder(fx.Interpreter):
    """Runs a traced module on an example and records the shape of every value."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> object:
        """The value of a node; its shape is kept."""
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.shapes[n] = tuple(result.shape[1:])
        return result


def traced_module(module: nn.Module) -> fx.GraphModule:
    """The module's operations as a graph; raises what torch raises where it cannot be traced."""
    return fx.GraphModule(module, _Tracer().trace(module))
