"""The former place of `SyclLearner`, from which older programs and scripts import."""

from pearl.backends.sycl.learner import SyclLearner as SyclLearner
