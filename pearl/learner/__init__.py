"""Learners: one stochastic-gradient step on a batch, per implementation; `registry` lists them."""
