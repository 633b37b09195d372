"""Goals that chance seldom reaches: DQN with hindsight in the bit-flipping environment, beside Stable-Baselines3's.

The environment is that of Andrychowicz et al. 2017 (Sec. 3.1) with random bits and goals (`benchmarks.flip_bits`); both
frameworks step the same class. Both train a DQN of two hidden layers of 64 with the same settings: no double
Q-learning, uniform replay, returns of one step, a batch of 64 for each step from the 1,000th on, four goals of later
steps for each transition. Half of the bits are wrong at the start of an episode, and the last flip costs nothing, so
that the best mean return is 1 - bits / 2; it counts as solved half a flip below. Every 1,000 steps, 20 greedy episodes
are played, and 20 others when their mean return is that; solved means that both are. Seconds are those of the whole
process, from its start: ours of the composed program, whose Actor and Learner share both cores, without composing it;
Stable-Baselines3's with one thread of torch. A run that did not solve the environment counts with all of its steps: its
row says so. Without hindsight, ours is the same program with no goals.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.flip_bits import (
    BATCH,
    BITS,
    EXPLORING,
    GAMMA,
    GOALS,
    LEAST_EPSILON,
    RATE,
    SIZES,
    SLOTS,
    STARTS,
    STEPS,
    TARGETS,
    environment_of,
    return_of,
)
from benchmarks.programs import composer_of
from benchmarks.record import Row, shown, write
from benchmarks.timing import options
from benchmarks.until_solved import Outcome, rows_of, run_ours, run_theirs
from pearl.algorithms import DQN
from pearl.exploration import EpsilonGreedy

SEEDS = 5


class FlipDQN(DQN):
    """The algorithm of both."""

    double = False
    hidden_sizes = SIZES
    learning_rate_schedule = "constant"
    exploration = EpsilonGreedy(1.0, LEAST_EPSILON, EXPLORING)
    target_update_interval = TARGETS
    tau = 1.0
    n_step = 1


def program_of(folder: Path, bits: int, goals: int) -> Path:
    """The composed program with so many goals for each transition."""
    training = {"batch_size": BATCH, "replay_ratio": BATCH, "learning_starts": STARTS, "hindsight_goals": goals}
    composer = composer_of(folder, FlipDQN, environment_of(bits), 1, SLOTS, training, gamma=GAMMA, learning_rate=RATE)
    composer.set_replay(SLOTS, mode="uniform")
    composer.run(budget_s=0)
    return Path(composer.runtime_gen(path=folder / "program.py", timesteps=STEPS))


def measure(bits: int, seeds: int) -> dict[str, list[Outcome]]:
    """Run all in turn."""
    import stable_baselines3

    runs: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        programs = {}
        for name, goals in (("ours", GOALS), ("without hindsight", 0)):
            (folder := Path(temporary) / str(goals)).mkdir()
            programs[name] = program_of(folder, bits, goals)
        for seed in range(1, 1 + seeds):
            found = {name: run_ours(program, return_of(bits), seed) for name, program in programs.items()}
            found[f"Stable-Baselines3 {stable_baselines3.__version__}"] = run_theirs(
                "Stable-Baselines3", "sb3_goals", "--seed", seed, "--bits", bits
            )
            for name, outcome in found.items():
                runs.setdefault(name, []).append(outcome)
                print(f"{bits} bits, seed {seed}, {name}: {outcome}", flush=True)
    return runs


def main() -> None:
    """Measure, and write the record."""
    quick = options(__doc__, "10 bits and one seed; writes nothing").parse_args().quick
    rows: list[Row] = []
    for bits in BITS[:1] if quick else BITS:
        rows += shown(rows_of(f"{bits} bits", measure(bits, 1 if quick else SEEDS)))
    if not quick:
        print(write("goals", "make bench-goals", 2, rows))


if __name__ == "__main__":
    main()
