"""The former place of `SyclDataStorage`, from which older programs and scripts import."""

from pearl.backends.sycl.storage import SyclDataStorage as SyclDataStorage
