"""Synthesizable pipelines in Amaranth, and the cycle counts that hold the FPGA model to account.

Not part of the wheel: run from the repository's root, with the extra `rtl` installed (`make rtl`).
"""
