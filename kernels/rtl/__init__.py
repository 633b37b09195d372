"""Synthesizable pipelines in Amaranth, and cycle counts that check the FPGA model.

Not part of the wheel: run from the repository's root, with the extra `rtl` installed (`make rtl`).
"""
