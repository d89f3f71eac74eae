"""OpenAI's API without HTTP: requests, responses and errors, for the server and for batches."""
