"""Composing programs with rollouts (on-policy): the same steps as with a replay, for other primitives."""
