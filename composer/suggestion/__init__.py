"""Settings for an environment and this machine: what random actions see, measured steps, choices, and their files."""
