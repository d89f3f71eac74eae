"""Chat templates: messages to token ids, the sandbox for jinja2, and the notation of tool calls."""
