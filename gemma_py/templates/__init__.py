"""From messages to the ids of a prompt: chat templates, the sandbox that they run in, and the notation of tool calls."""
