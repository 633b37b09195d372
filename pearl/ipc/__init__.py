"""Communication of processes and threads, independent of RL: shared memory, doorbells, ring queues, snapshots."""
