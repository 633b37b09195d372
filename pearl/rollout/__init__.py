"""On-policy data, independent of devices: rollouts, their standardisation, and generalized advantage estimation."""

from pearl.rollout.gae import AdvantageEstimator as AdvantageEstimator
from pearl.rollout.gae import NumpyGae as NumpyGae
from pearl.rollout.quantization import Codes as Codes
from pearl.rollout.quantization import RunningStatistics as RunningStatistics
from pearl.rollout.quantization import quantized as quantized
