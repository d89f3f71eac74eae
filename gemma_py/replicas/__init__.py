"""Replicas: whole copies of a model in processes of their own, which answer requests side by side."""
