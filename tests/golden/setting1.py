#!/usr/bin/env python3
"""TinyDQN on CartPole-v1.

A runtime program composed by PEARL 1.2.3. Edit it freely.

Placement for throughput (setting 1: the Replay Manager and the Learner talk through the host):
    Replay Manager  cpu0 (cpu), fanout 16
    Learner         cpu1 (cpu), torch, 2 thread(s), 1 sub-batch(es)
    Data Storage    cpu1
    Actors          cpu0, 4 x 8 environments
Predicted: 2,124,439 experiences trained per second,
    not waiting for data, with Actors that collect at a replay ratio of 8.

The Host Runtime below moves messages between the queues of the paper's Figure 4:
    DCQ  Data Collection Queues       Actors -> host: transitions
    WSQ  Weight Sync Queue            Learner -> Actors: newest policy weights
    RRQ  Replay Manager Request Queue host <-> Replay Manager: sample, insert, update
    LAQ  Learner Assignment Queue     host -> Learner: sampled batches
    LDQ  Learner Done Queue           Learner -> host: new priorities
"""

from __future__ import annotations

from pearl.runtime import begin_program

if __name__ == "__main__":
    begin_program(actors=4)  # before the imports

from pearl.learner.torch_learner import TorchLearner
from pearl.replay import ReplayRequestQueue, make_replay_manager
from pearl.runtime import (
    AssignmentQueue,
    CollectionBuffer,
    ComposerInputs,
    DataCollectionQueue,
    DoneQueue,
    HostIteration,
    LearnerWorker,
    Program,
    Session,
    WeightSyncQueue,
    import_class,
    parse_options,
    run_program,
)
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec

TinyDQN = import_class(
    "trainers",
    "TinyDQN",
    folder="..",  # relative to this file
    program=__file__,
)
PROGRAM = Program(
    name="cartpole",
    predicted_eps=2124439.0,  # a second, not waiting for data, with Actors that collect at a replay ratio of 8
    predicted_free_eps=2124439.0,  # with Actors that run free, as with --bench
    predicted_us={
        "sampling": 10.0,
        "gather": 0.254,
        "insertion per transition": 0.318,
        "update": 10.0,
        "training": 20.0,
        "communication": 2.33,
        "iteration": 30.126,
    },
    devices={"actors": "cpu0", "replay_manager": "cpu0", "storage": "cpu1", "learner": "cpu1"},
    composed_from="the devices found on the machine that composed it",
    composer_inputs=ComposerInputs(  # further inputs of the composer, for --recompose
        trainer="TinyDQN",
        placed="Replay Manager on cpu0, torch Learner on cpu1, Data Storage on cpu1",
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
    priority_update_delay=1,
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
        until_return=None,
    )
    with Session(
        PROGRAM,
        options,
        trainer_class=TinyDQN,
        settings=SETTINGS,
        actors=ACTORS,
        replay=REPLAY,
        train=TRAIN,
    ) as session:
        # === Primitives, on the devices that the composer chose ===
        trainer = session.make_trainer(device="cpu")
        learner = TorchLearner(
            trainer,
            device="cpu",
            threads=2,
            sub_batches=1,
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
        slots = TRAIN.priority_update_delay + 1
        laq = AssignmentQueue(TRAIN.batch_size, session.transition, slots)
        ldq = DoneQueue(TRAIN.batch_size, slots, session.bell)
        rrq = ReplayRequestQueue(
            replay,
            max_batch=max(TRAIN.batch_size, session.insertion_rows + session.message_rows),
            executor="inline" if options.serial else "autorun",
        )
        session.watch(rrq)

        # === Launch the Actors and the Learner's autorun loop; the RM's started with its queue ===
        session.launch(
            LearnerWorker(
                laq,
                ldq,
                wsq,
                session.bell,
                target=learner,
                weight_sync_interval=TRAIN.weight_sync_interval,
            )
        )
        session.launch_actors(dcqs, wsq)

        # === Host Runtime ===
        iteration = HostIteration(rrq, laq, ldq, TRAIN.batch_size, storage)
        while session.running():
            # Collect data: it waits in the buffer until a sampling has ended.
            for dcq in dcqs:
                if session.wants_data(buffer) and (message := buffer.take(dcq)):
                    session.collected(message)
            # Write back new priorities (LDQ -> RRQ), request a batch (RRQ), assign a sampled one (RRQ -> LAQ): at most
            # D updates ahead and no faster than the replay ratio.
            iteration.advance(session)
            # Populate the replay while the Learner trains, never a slot that it trains on.
            if session.insertion_due(buffer):
                rrq.write_insert(storage.insert(buffer.take_all()), buffer.priorities)
                session.inserted()
            session.wait()
        return session.finish()


if __name__ == "__main__":
    run_program(main)
