"""Requests, responses and errors in OpenAI's format, without HTTP. Used by the server and by `gemma_py batch`."""
