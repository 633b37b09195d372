"""The former place of `TorchDataStorage`, from which older programs and scripts import."""

from pearl.backends.cuda.storage import TorchDataStorage as TorchDataStorage
