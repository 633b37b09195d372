"""The report of a run as one HTML file: what was composed, what was predicted, and what the run measured."""
