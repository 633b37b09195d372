"""Actors on other nodes through Ray, which carries placement, life and death, and messages of about a megabyte."""
