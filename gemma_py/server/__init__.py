"""An HTTP server with OpenAI's API.

acceptor.py   accepts connections
protocol.py   disconnects clients that are too slow
auth.py       checks the Host header, the Origin header and the API key
app.py        defines the routes
http.py       reads request bodies and writes errors
openai/       checks requests, converts requests for the scheduler, and builds responses, also for `gemma_py batch`
audits.py     checks receipts for the page /audit
events.py     carries the scheduler's events into the event loop
streaming.py  sends responses, as server-sent events or as one JSON document
metrics.py    keeps the metrics for Prometheus
process.py    handles signals and the shutdown
web_ui/       contains the chat page and the page /audit
"""
