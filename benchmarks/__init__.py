"""Benchmarks: each module prints a table and writes benchmarks/results/<name>.json."""
