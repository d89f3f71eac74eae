"""The requests, responses and errors of OpenAI's API, independent of HTTP. The server and `gemma_py batch` use them."""
