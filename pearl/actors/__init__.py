"""Actors: environments and policy inference, producing transitions."""
