"""Sweeps: settings searched by Optuna, each trial of them a generated program that is run with several seeds."""
