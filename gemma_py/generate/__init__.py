"""From a prompt to tokens: the engine and its sessions, sampling, the text of an answer, and the scheduler of many requests."""
