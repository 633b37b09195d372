"""Between processes and threads: shared memory, doorbells, ring queues, versioned snapshots. Nothing here knows RL."""
