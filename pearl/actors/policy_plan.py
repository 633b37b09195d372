"""Reads from a trainer what an actor's policy in C++ must know, or says in one line what it cannot do."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np
from gymnasium import spaces

from pearl.actors.native_policy import NativePolicy, PolicyPlan, RolloutPlan, Scale
from pearl.algorithms.arrays import Array, ArrayModule, operations_of
from pearl.algorithms.on_policy import OnPolicyTrainer
from pearl.algorithms.trainer import SamplesActions, Trainer, policy_snapshot, set_evaluation_mode
from pearl.algorithms.update_rule import AnyModule, AnyScale, PolicyHead, RuleNetwork, update_rule_of
from pearl.errors import TrainerError
from pearl.lazy_torch import torch
from pearl.learner.flat import FlatParameters
from pearl.learner.native_plan import NativeOp, UnsupportedError, offset_of, read_native_operations, trial_inputs
from pearl.moments import OBSERVATION_CLIP

_TRIALS = 16
_TOLERANCE = 1e-4  # of the trial: a policy that computes something else is further off


def read_policy(trainer: object) -> PolicyPlan:
    """The plan of the trainer's policy with the weights that it has now; UnsupportedError names what cannot be native.

    Unless its networks are in arrays, it is tried against the trainer on a few random observations, so that nothing a
    trace leaves out goes unnoticed.
    """
    rule = update_rule_of(trainer, arrays=True)
    if rule is None or not isinstance(trainer, Trainer):
        raise UnsupportedError(f"the policy of {type(trainer).__name__}, which is none of the built-in algorithms")
    if rule.policy.departure is not None:
        raise UnsupportedError(rule.policy.departure)
    plan = dataclasses.replace(_plan(trainer, rule.policy), quantiles=rule.quantiles if rule.actor is None else 0)
    try:
        policy = NativePolicy(plan)
    except TrainerError as error:
        raise UnsupportedError(str(error)) from error
    if trainer.arrays is None:
        _try(policy, plan, trainer)
    return plan


def _plan(trainer: Trainer, head: PolicyHead) -> PolicyPlan:
    of_bytes, greedy = _of_bytes(trainer), head.kind == "argmax"
    if of_bytes and not greedy:
        raise UnsupportedError("observations of unsigned bytes")
    place = {id(tensor): offset for _, tensor, offset in _places(head.module)}
    inputs, operations = _operations(head.network, place, images=greedy, of_bytes=of_bytes)
    plan = PolicyPlan(inputs, operations, head.kind, policy_snapshot(trainer), trainer.exploration, of_bytes=of_bytes)
    if greedy:
        return plan
    shape = tuple(trainer.action_space.shape or ())
    if head.value is not None:
        return dataclasses.replace(plan, action_shape=shape, rollout=_rollout(trainer, head, head.value, place))

    def scale(found: AnyScale | None) -> Scale | None:
        if found is None:
            return None
        return Scale(place[id(found.center)], place[id(found.half_range)], found.center.numel())

    return dataclasses.replace(
        plan,
        action_shape=shape,
        observation_scale=scale(head.observation_scale),
        action_scale=scale(head.action_scale),
        log_std_bounds=head.log_std_bounds,
    )


def _rollout(trainer: Trainer, head: PolicyHead, value: RuleNetwork, place: Mapping[int, int]) -> RolloutPlan:
    networks, space = head.module, trainer.action_space
    if not isinstance(networks, ArrayModule):
        from pearl.algorithms.policy_and_value import PolicyAndValue

        if not isinstance(networks, PolicyAndValue):
            raise UnsupportedError(f"a policy of class {type(networks).__name__}")
    normalization = None
    if hasattr(networks, "observation_mean"):
        normalization = (place[id(networks.observation_mean)], place[id(networks.observation_scale)])
    _, operations = _operations(value, place)
    return RolloutPlan(
        operations,
        head.sizes,
        len(head.sizes) or math.prod(space.shape or ()),
        None if networks.log_std is None else place[id(networks.log_std)],
        normalization,
        OBSERVATION_CLIP,
        (space.low.astype(np.float32), space.high.astype(np.float32)) if isinstance(space, spaces.Box) else None,
    )


def _places(module: AnyModule) -> Iterator[tuple[str, torch.Tensor | Array, int]]:
    """Where the snapshot holds each tensor: parameters, then floating buffers."""
    tensors: list[tuple[str, torch.Tensor | Array]] = list(module.named_parameters())
    tensors += [(name, buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point()]
    offset = 0
    for name, tensor in tensors:
        yield name, tensor, offset
        offset += tensor.numel()


def _of_bytes(trainer: Trainer) -> bool:
    return trainer.observation_space.dtype == np.uint8


def _operations(
    read: RuleNetwork, place: Mapping[int, int], *, images: bool = False, of_bytes: bool = False
) -> tuple[int, tuple[NativeOp, ...]]:
    """Inputs and operations of a network, whose parameters the snapshot holds at `place`, by their identity."""
    name = read.name
    if isinstance(read.module, ArrayModule):
        arrays = operations_of(read.module, lambda array: place[id(array)])
        return math.prod(read.input_shape), tuple(arrays)
    # A copy: it is moved to the CPU, set to evaluation and given a memory of its own, while the original may train.
    try:
        network = copy.deepcopy(read.module).cpu()
    except Exception as error:
        raise UnsupportedError(f"network {name!r} cannot be copied: {type(error).__name__}: {error}") from error
    set_evaluation_mode(network)
    originals = dict(read.module.named_parameters())
    if not originals:
        raise UnsupportedError(f"network {name!r} has no parameters")
    flat = FlatParameters(network, gradients=False)
    try:
        inputs, operations = read_native_operations(
            name, network, read.input_shape, flat, images=images, of_bytes=of_bytes
        )
    except TrainerError as error:
        raise UnsupportedError(str(error)) from error
    moved = {offset_of(key, p, flat): place[id(originals[key])] for key, p in network.named_parameters()}
    return inputs, tuple(_moved(operation, moved) for operation in operations)


def _moved(operation: NativeOp, moved: Mapping[int, int]) -> NativeOp:
    """The operation with its parameters at other offsets."""
    if len(operation) == 6:
        kind, value, width, weight, bias, window = operation
        return kind, value, width, moved.get(weight, weight), moved.get(bias, bias), window
    kind, first, second, width, weight, bias, eps = operation
    return kind, first, second, width, moved.get(weight, weight), moved.get(bias, bias), eps


def _try(policy: NativePolicy, plan: PolicyPlan, trainer: Trainer) -> None:
    generator = torch.Generator().manual_seed(0)
    obs = trial_inputs(_TRIALS, trainer.input_shape, of_bytes=_of_bytes(trainer))
    training = set_evaluation_mode(trainer)
    try:
        with torch.no_grad():
            if isinstance(trainer, OnPolicyTrainer) and plan.rollout is not None:
                same = _explores_alike(policy, plan.rollout, trainer, obs, generator)
            else:
                same = _acts_alike(policy, plan, trainer, obs, generator)
    finally:
        for module in training:
            module.training = True
    if not same:
        raise UnsupportedError(f"the policy of {type(trainer).__name__}, which acts otherwise than its layers say")


def _acts_alike(
    policy: NativePolicy, plan: PolicyPlan, trainer: Trainer, obs: torch.Tensor, generator: torch.Generator
) -> bool:
    noise = torch.randn((_TRIALS, *plan.action_shape), generator=generator)
    greedy = trainer.get_action(obs.to(trainer.device)).cpu().numpy()
    if plan.head == "argmax":
        return _best(policy.values(obs.numpy()), greedy)
    same = _close(policy.act(obs.numpy()), greedy)
    if isinstance(trainer, SamplesActions) and plan.head == "gaussian":
        drawn = trainer.sample_action(obs.to(trainer.device), noise.to(trainer.device)).cpu().numpy()
        same &= _close(policy.sample(obs.numpy(), noise.numpy()), drawn)
    return same


def _explores_alike(
    policy: NativePolicy, rollout: RolloutPlan, trainer: OnPolicyTrainer, obs: torch.Tensor, generator: torch.Generator
) -> bool:
    draw = torch.rand if rollout.sizes else torch.randn
    noise = draw((_TRIALS, rollout.size), generator=generator)
    on_device = obs.to(trainer.device)
    greedy = trainer.get_action(on_device).cpu().numpy()
    explored = [found.cpu().numpy() for found in trainer.explore(on_device, noise.to(trainer.device))]
    if rollout.sizes:
        parts = np.split(policy.values(obs.numpy()), np.cumsum(rollout.sizes)[:-1], axis=1)
        chosen = greedy.reshape(_TRIALS, -1).T
        same = all(_best(part, choice) for part, choice in zip(parts, chosen, strict=True))
    else:
        same = _close(policy.act(obs.numpy()), greedy)
    found = policy.explore(obs.numpy(), noise.numpy())
    same &= all(_close(ours, theirs) for ours, theirs in zip(found, explored, strict=True))
    return same and _close(policy.value(obs.numpy()), trainer.values(on_device).cpu().numpy())


def _best(values: np.ndarray, chosen: np.ndarray) -> bool:
    """Whether each choice has the largest value of its row, or nearly."""
    best = values.max(axis=1)
    short = best - np.take_along_axis(values, chosen[:, None], axis=1)[:, 0]
    return bool((short <= _TOLERANCE * (1.0 + np.abs(best))).all())


def _close(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.shape == expected.shape and np.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
