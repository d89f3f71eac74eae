"""Conversations of several turns, and how they are saved."""
