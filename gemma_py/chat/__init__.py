"""Conversations, and the file format of saved conversations."""
