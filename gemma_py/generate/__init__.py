"""Generation: the engine, sessions, sampling, streaming of text, and the scheduler of concurrent requests."""
