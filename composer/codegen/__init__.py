"""The text of runtime programs, from validated values only."""
