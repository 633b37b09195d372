"""The former place of `pearl.exploration`, from which older programs and scripts import."""

from pearl.exploration import EpsilonGreedy as EpsilonGreedy
from pearl.exploration import GaussianNoise as GaussianNoise
from pearl.exploration import OrnsteinUhlenbeck as OrnsteinUhlenbeck
from pearl.exploration import PolicySampling as PolicySampling
