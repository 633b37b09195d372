"""Serial mode's actor: no process, no thread, the same messages."""

from __future__ import annotations

import dataclasses
import time

from pearl.actors.actor import ActorSetup
from pearl.actors.notices import NO_NOTICES, Notices
from pearl.actors.rollout_actor import make_actor
from pearl.ipc.queues import WeightSyncQueue
from pearl.runtime.queues import DataCollectionQueue


class InlineActor:
    """Collects one message whenever its queue is empty, so that the policy is at most one message old."""

    def __init__(
        self,
        setup: ActorSetup,
        dcq: DataCollectionQueue,
        wsq: WeightSyncQueue,
        notices: Notices = NO_NOTICES,
    ) -> None:
        if setup.spec.vectorization == "async":  # the same transitions, without processes
            setup = dataclasses.replace(setup, spec=dataclasses.replace(setup.spec, vectorization="sync"))
        self._setup, self._dcq = setup, dcq
        # Its own reader: a shared one would return each version only to the first that polls.
        self._wsq = wsq.reader()
        self._notices = notices.reader()
        self._actor = make_actor(dataclasses.replace(setup, env_attributes=self._notices.newest_attributes()))

    def run_once(self) -> bool:
        """Collect a message, if there is room."""
        if len(self._dcq):
            return False
        if (weights := self._wsq.poll()) is not None:
            self._actor.load_weights(weights, self._wsq.version)
        self._notices.tell(self._actor)
        message = self._dcq.reserve()
        assert message is not None
        start = time.perf_counter()
        rows = self._actor.collect(message)
        message["span"][:] = start, time.perf_counter()
        self._dcq.publish(rows)
        return True

    def restarted(self, env_steps: int) -> InlineActor:
        """A new actor, as a resumed run would make it; collected data that was not taken is dropped."""
        self._actor.close()
        while self._dcq.peek() is not None:
            self._dcq.release()
        setup = dataclasses.replace(self._setup, env_steps=env_steps, restarts=env_steps)
        return InlineActor(setup, self._dcq, self._wsq, self._notices)

    def close(self) -> None:
        """Close its environments."""
        self._actor.close()
