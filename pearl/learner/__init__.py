"""Learners: one stochastic-gradient step on a batch, per backend."""
