"""An HTTP server with OpenAI's API.

openai/: what a request may hold, how it becomes requests to the scheduler, and how their events become a response; a batch reads
the same requests from a file. acceptor: connections. protocol: limits on time. auth: who may use the server. app: the routes.
http: bodies and errors. events: from the scheduler to the event loop. streaming: server-sent events. process: signals and
shutdown.
"""
