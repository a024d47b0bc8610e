"""Answers of a given form: what a constraint may say, its check in a process of its own, and its masks in the engine."""
