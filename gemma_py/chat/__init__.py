"""Conversations that go on turn by turn, and how they are saved."""
