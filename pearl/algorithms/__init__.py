"""Trainer classes: derive from one, or use any class with `get_action` and `update_policy`."""

# The table of algorithms, one line each. Messages name them in this order.
# isort: off
from pearl.algorithms.dqn import DQN as DQN
from pearl.algorithms.qr_dqn import QRDQN as QRDQN
from pearl.algorithms.recurrent_dqn import RecurrentDQN as RecurrentDQN
from pearl.algorithms.ddpg import DDPG as DDPG
from pearl.algorithms.td3 import TD3 as TD3
from pearl.algorithms.sac import SAC as SAC
from pearl.algorithms.redq import REDQ as REDQ
from pearl.algorithms.droq import DroQ as DroQ
from pearl.algorithms.crossq import CrossQ as CrossQ
from pearl.algorithms.tqc import TQC as TQC
from pearl.algorithms.ppo import PPO as PPO
from pearl.algorithms.ppo import A2C as A2C
from pearl.algorithms.recurrent_ppo import RecurrentPPO as RecurrentPPO
# isort: on

from pearl.algorithms.batch import Batch as Batch
from pearl.algorithms.spaces import ActionKind
from pearl.algorithms.trainer import Phase as Phase
from pearl.algorithms.trainer import Trainer as Trainer
from pearl.algorithms.trainer import TrainerLike as TrainerLike
from pearl.algorithms.trainer import make_trainer as make_trainer

__all__ = [
    "A2C",
    "DDPG",
    "DQN",
    "PPO",
    "QRDQN",
    "REDQ",
    "SAC",
    "TD3",
    "TQC",
    "Batch",
    "CrossQ",
    "DroQ",
    "Phase",
    "RecurrentDQN",
    "RecurrentPPO",
    "Trainer",
    "TrainerLike",
    "make_trainer",
]  # without it, `import *` brings the modules of this package: `spaces` would take the place of gymnasium's

ALGORITHMS: dict[str, type[Trainer]] = {
    name: found
    for name, found in list(globals().items())
    if isinstance(found, type) and issubclass(found, Trainer) and found is not Trainer
}


def algorithms_for(action_kind: ActionKind | None = None) -> list[str]:
    """The names of the algorithms, or of those that take actions of `action_kind`."""
    return [name for name, found in ALGORITHMS.items() if action_kind is None or action_kind in found._action_kinds]


def one_of_algorithms(action_kind: ActionKind | None = None) -> str:
    """The same names as "A, B or C"."""
    *others, last = algorithms_for(action_kind)
    return f"{', '.join(others)} or {last}" if others else last
