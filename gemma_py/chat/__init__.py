"""Conversations of several turns, and the file format of saved conversations."""
