#!/usr/bin/env python3
"""DQN on CartPole-v1.

A runtime program composed by PEARL 1.2.3. Edit it freely.

Placement for throughput (setting 2: each Learner has a bank of the replay in its process):
    Replay Manager  cpu0 (cpu), fanout 16
    Learner         cpu0 (cpu), native, 1 thread(s), 1 sub-batch(es)
    Learners        4, each with a bank of the replay and batches of 16; averaged every 32 steps
    Data Storage    cpu0
    Actors          cpu0, 4 x 8 environments
Predicted: 1,578,065 experiences trained per second,
    not waiting for data, with Actors that collect at a replay ratio of 8.

The Host Runtime below moves messages between the queues of the paper's Figure 4:
    DCQ  Data Collection Queues       Actors -> host: transitions
    LAQ  Learner Assignment Queues    host -> Learners: transitions, for the bank of each
    WSQ  Weight Sync Queue            host -> Actors: the policy of the newest average
"""

from __future__ import annotations

from pearl.runtime import begin_program

if __name__ == "__main__":
    begin_program(actors=8)  # before the imports

from pearl.algorithms import DQN
from pearl.backends.cpu.learner import NativeLearner
from pearl.runtime import (
    CollectionBuffer,
    DataCollectionQueue,
    LearnersSession,
    Program,
    WeightSyncQueue,
    parse_options,
    run_program,
)
from pearl.spec import ActorSpec, LearnersSpec, ReplaySpec, TrainSpec

PROGRAM = Program(
    name="cartpole",
    predicted_eps=1578064.9,  # a second, not waiting for data, with Actors that collect at a replay ratio of 8
    predicted_free_eps=1578064.9,  # with Actors that run free, as with --bench
    predicted_us={
        "sampling": 10.0,
        "gather": 0.254,
        "insertion per transition": 0.318,
        "update": 10.0,
        "training": 20.0,
        "communication": 0.428,
        "iteration": 40.556,
    },
    devices={"actors": "cpu0", "replay_manager": "cpu0", "storage": "cpu0", "learner": "cpu0"},
    composed_from="the devices found on the machine that composed it",
)
ACTORS = ActorSpec(
    env="CartPole-v1",
    count=4,
    envs_per_actor=8,
    vectorization="sync",
)
REPLAY = ReplaySpec(
    capacity=100000,
    mode="prioritized",
    fanout=16,
    alpha=0.6,
    beta=0.4,
    beta_final=1.0,
)
TRAIN = TrainSpec(
    batch_size=64,
    replay_ratio=8.0,
    learning_starts=1000,
    priority_update_delay=0,  # setting 2: each sampling waits for the last update
    gamma=0.99,
    n_step=1,
    weight_sync_interval=8,  # in effect: every average
)
LEARNERS = LearnersSpec(
    count=4,
    average_every=32,
    moments="average",
    overlap=0,
)
SETTINGS: dict[str, object] = {}


def main() -> int:
    """Train, evaluate, and leave weights, curve and logs in the run folder."""
    options = parse_options(
        __doc__,
        timesteps=100000,
        run_dir="runs/cartpole",
        program=__file__,
        until_return=475.0,
    )
    with LearnersSession(
        PROGRAM,
        options,
        trainer_class=DQN,
        settings=SETTINGS,
        actors=ACTORS,
        replay=REPLAY,
        learners=LEARNERS,
        train=TRAIN,
    ) as session:
        # === Primitives, on the devices that the composer chose ===
        trainer = session.make_trainer(device="cpu")
        learners = session.make_learners(
            NativeLearner,
            threads=1,
        )
        learner = learners.make_learner(trainer)  # the host's: it has the newest average, and never trains
        session.attach_learners(learners)

        # === Queues; those to the Learners are made with their processes ===
        wsq = WeightSyncQueue(learner.weight_count)
        dcqs = [
            DataCollectionQueue(session.transition, session.message_rows, 2, session.bell) for _ in range(ACTORS.count)
        ]
        buffer = CollectionBuffer(session.transition, session.insertion_rows, session.message_rows)

        # === Launch the Learners (each: sample its bank -> gather -> train -> update; all average) and the Actors ===
        session.launch(learners)
        session.publish(learner, wsq)
        session.launch_actors(dcqs, wsq)
        learners.wait_until_ready()

        # === Host Runtime ===
        while session.running():
            # Collect data: it waits in the buffer until a Learner has room.
            for dcq in dcqs:
                if session.wants_data(buffer) and (message := buffer.take(dcq)):
                    session.collected(message)
            # Send the transitions to the banks, in turn. A Learner takes no more than its replay ratio needs.
            if session.insertion_due(buffer):
                learners.insert(buffer.take_all(), session.beta, session.progress)
                session.inserted()
            # After an average, give its policy to the Actors.
            session.averaged(learner, wsq)
            session.wait()
        return session.finish()


if __name__ == "__main__":
    run_program(main)
