"""FPGAs, which may be absent: a model of their pipelines, and readers of compiler reports on designs."""
