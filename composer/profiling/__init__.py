"""Measurements: one file per part of a run, and the profiler that fills the assignment matrix."""
