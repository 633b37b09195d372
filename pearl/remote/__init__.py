"""Actors and Learners on other nodes through Ray: placement, life and death, and messages of about a megabyte."""
