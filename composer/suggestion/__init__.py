"""Settings for an environment and this machine: random steps, measured gradient steps, choices, and their files."""
