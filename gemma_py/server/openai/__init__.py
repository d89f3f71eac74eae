"""The requests, responses and errors of OpenAI's API, without HTTP. The server and `gemma_py batch` use this package."""
