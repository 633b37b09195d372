#!/usr/bin/env python3
"""DQN on CartPole-v1.

A runtime program composed by PEARL 1.2.3. Edit it freely.

Placement for throughput (setting 2: the Replay Manager and the Learner share a device and talk directly):
    Replay Manager  cpu0 (cpu), fanout 16
    Learner         cpu0 (cpu), native, 1 thread(s), 1 sub-batch(es)
    Data Storage    cpu0
    Actors          cpu0, 4 x 8 environments
Predicted: 1,578,065 experiences trained per second,
    not waiting for data, with Actors that collect at a replay ratio of 8.

The Host Runtime below moves messages between the queues of the paper's Figure 4:
    DCQ  Data Collection Queues       Actors -> host: transitions
    WSQ  Weight Sync Queue            Learner -> Actors: newest policy weights
    LAQ  Learner Assignment Queue     host -> training loop: iterations it may run
    LDQ  Learner Done Queue           training loop -> host: iterations done
"""

from __future__ import annotations

from pearl.runtime import begin_program

if __name__ == "__main__":
    begin_program(actors=4)  # before the imports

from pearl.algorithms import DQN
from pearl.backends.cpu.learner import NativeLearner
from pearl.replay import make_replay_manager
from pearl.runtime import (
    CollectionBuffer,
    ComposerInputs,
    DataCollectionQueue,
    GrantQueue,
    Program,
    ProgressQueue,
    Session,
    TrainingLoop,
    WeightSyncQueue,
    parse_options,
    run_program,
)
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec

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
    composer_inputs=ComposerInputs(  # further inputs of the composer, for --recompose
        trainer="DQN",
        placed="Replay Manager on cpu0, native Learner on cpu0, Data Storage on cpu0",
        devices="",
        connections="",
    ),
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
    weight_sync_interval=8,
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
    with Session(
        PROGRAM,
        options,
        trainer_class=DQN,
        settings=SETTINGS,
        actors=ACTORS,
        replay=REPLAY,
        train=TRAIN,
    ) as session:
        # === Primitives, on the devices that the composer chose ===
        trainer = session.make_trainer(device="cpu")
        learner = NativeLearner(
            trainer,
            threads=1,
        )
        replay = make_replay_manager(REPLAY, seed=options.seed)
        storage = session.make_storage()
        session.attach(replay, storage)

        # === Queues ===
        wsq = WeightSyncQueue(learner.weight_count)
        dcqs = [
            DataCollectionQueue(session.transition, session.message_rows, 2, session.bell) for _ in range(ACTORS.count)
        ]
        buffer = CollectionBuffer(session.transition, session.insertion_rows, session.message_rows)
        laq = GrantQueue(2)
        ldq = ProgressQueue(2, session.bell)

        # === Launch the training loop (sample -> gather -> train -> update, without the host) and the Actors ===
        loop = TrainingLoop(
            laq,
            ldq,
            wsq,
            session.bell,
            replay=replay,
            storage=storage,
            learner=learner,
            batch_size=TRAIN.batch_size,
            transition=session.transition,
            weight_sync_interval=TRAIN.weight_sync_interval,
        )
        session.launch(loop)
        session.launch_actors(dcqs, wsq)

        # === Host Runtime ===
        while session.running():
            # Collect data: it waits in the buffer until a sampling has ended.
            for dcq in dcqs:
                if session.wants_data(buffer) and (message := buffer.take(dcq)):
                    session.collected(message)
            # Populate the replay between two samplings: the Learner trains on copies of the rows it was given.
            if session.insertion_due(buffer):
                with loop.insertion_window():
                    replay.insert(storage.insert(buffer.take_all()), buffer.priorities)
                session.inserted()
            # The training loop reports; it gets the next iterations, no more than the replay ratio allows.
            if done := ldq.peek():
                result, _ = done
                session.trained(float(result["td_error"][0]), int(result["iterations"][0]))
                ldq.release()
            if iterations := session.iterations_to_grant():
                session.granted(iterations)  # before the grant, which wakes the loop: it may take this core
                laq.grant(iterations, session.beta)
            session.wait()
        return session.finish()


if __name__ == "__main__":
    run_program(main)
