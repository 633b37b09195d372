"""Reverb: a server with a gRPC interface; its Python package imports TensorFlow."""

from importlib.metadata import version

try:
    import reverb  # noqa: F401
except ImportError as error:
    raise ImportError(f"needs TensorFlow 2.15, which needs NumPy below 2 ({error})") from error

VERSION = version("dm-reverb")
