"""Reads from a trainer what an actor's policy in C++ must know, or says in one line what it cannot do."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from pearl.actors.native_policy import NativePolicy, Operation, PolicyPlan, Scale
from pearl.algorithms.networks import ToUnit
from pearl.algorithms.trainer import SamplesActions, Trainer, policy_snapshot, set_evaluation_mode
from pearl.algorithms.update_rule import PolicyHead, update_rule_of
from pearl.errors import TrainerError
from pearl.learner.flat import FlatParameters
from pearl.learner.native_plan import UnsupportedError, read_operations

_TRIALS = 16
_TOLERANCE = 1e-4  # of the trial: what computes something else is further off


def read_policy(trainer: object) -> PolicyPlan:
    """The plan of the trainer's policy with the weights that it has now; UnsupportedError names what cannot be native.

    It is tried against the trainer on a few random observations, so that nothing a trace leaves out goes unnoticed.
    """
    rule = update_rule_of(trainer)
    if rule is None or not isinstance(trainer, Trainer):
        raise UnsupportedError(f"the policy of {type(trainer).__name__}, which is none of the built-in algorithms")
    if rule.policy.departure is not None:
        raise UnsupportedError(rule.policy.departure)
    plan = _plan(trainer, rule.policy)
    _try(plan, trainer)
    return plan


def _plan(trainer: Trainer, head: PolicyHead) -> PolicyPlan:
    if trainer.observation_space.dtype == np.uint8:
        raise UnsupportedError("observations of unsigned bytes")
    weights = policy_snapshot(trainer)
    network = head.network
    inputs, operations = _operations(network.module, network.name, network.input_shape)
    if head.kind == "argmax":
        return PolicyPlan(inputs, operations, head.kind, weights, trainer.exploration)
    place = {id(tensor): offset for _, tensor, offset in _places(head.module)}

    def scale(found: ToUnit | None) -> Scale | None:
        if found is None:
            return None
        return Scale(place[id(found.center)], place[id(found.half_range)], found.center.numel())

    return PolicyPlan(
        inputs,
        operations,
        head.kind,
        weights,
        trainer.exploration,
        tuple(trainer.action_space.shape or ()),
        scale(head.observation_scale),
        scale(head.action_scale),
        head.log_std_bounds,
    )


def _places(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Where the snapshot holds each tensor: parameters, then floating buffers."""
    tensors: list[tuple[str, torch.Tensor]] = list(module.named_parameters())
    tensors += [(name, buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point()]
    offset = 0
    for name, tensor in tensors:
        yield name, tensor, offset
        offset += tensor.numel()


def _operations(network: nn.Module, name: str, input_shape: tuple[int, ...]) -> tuple[int, tuple[Operation, ...]]:
    """Inputs and operations of the network, whose parameters are the first of the snapshot."""
    # A copy: it is moved to the CPU, set to evaluation and given a memory of its own, while the original may train.
    try:
        network = copy.deepcopy(network).cpu()
    except Exception as error:
        raise UnsupportedError(f"network {name!r} cannot be copied: {type(error).__name__}: {error}") from error
    set_evaluation_mode(network)
    if not list(network.parameters()):
        raise UnsupportedError(f"network {name!r} has no parameters")
    flat = FlatParameters(network, gradients=False)
    try:
        inputs, operations = read_operations(name, network, input_shape, flat)
    except TrainerError as error:
        raise UnsupportedError(str(error)) from error
    start = flat.parameter.data_ptr()
    place = {name: offset for name, _, offset in _places(network)}
    moved = {(p.data_ptr() - start) // p.element_size(): place[key] for key, p in network.named_parameters()}
    return inputs, tuple(
        (kind, first, second, width, moved.get(weight, weight), moved.get(bias, bias), eps)
        for kind, first, second, width, weight, bias, eps in operations
    )


def _try(plan: PolicyPlan, trainer: Trainer) -> None:
    try:
        policy = NativePolicy(plan)
    except TrainerError as error:
        raise UnsupportedError(str(error)) from error
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn((_TRIALS, *trainer.input_shape), generator=generator)
    noise = torch.randn((_TRIALS, *plan.action_shape), generator=generator)
    device = trainer.device
    drawn = None
    training = set_evaluation_mode(trainer)
    try:
        with torch.no_grad():
            greedy = trainer.get_action(obs.to(device)).cpu().numpy()
            if isinstance(trainer, SamplesActions) and plan.head == "gaussian":
                drawn = trainer.sample_action(obs.to(device), noise.to(device)).cpu().numpy()
    finally:
        for module in training:
            module.training = True
    if plan.head == "argmax":
        values = policy.values(obs.numpy())
        best = values.max(axis=1)
        chosen = np.take_along_axis(values, greedy[:, None], axis=1)[:, 0]
        same = best - chosen <= _TOLERANCE * (1.0 + np.abs(best))
    else:
        same = np.isclose(policy.act(obs.numpy()), greedy, rtol=_TOLERANCE, atol=_TOLERANCE)
    if drawn is not None:
        same &= np.isclose(policy.sample(obs.numpy(), noise.numpy()), drawn, rtol=_TOLERANCE, atol=_TOLERANCE)
    if not same.all():
        raise UnsupportedError(f"the policy of {type(trainer).__name__}, which acts otherwise than its layers say")
