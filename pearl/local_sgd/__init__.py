"""Several Learners that average their parameters: local SGD (thesis, chapter 5; docs/local_sgd.md)."""
