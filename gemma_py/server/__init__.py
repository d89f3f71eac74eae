"""An HTTP server in OpenAI's form, and batches of the same requests from a file.

schemas: what a request may hold. prompts: from a request to what the scheduler takes. answers: from its events to responses.
constraint: answers held to a JSON schema. guard: who may ask. protocol: how long a client may take. app: the routes. run: the
process. batch: a file instead of a socket.
"""
