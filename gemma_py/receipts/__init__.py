"""Receipts: how an answer was made, in a form that anyone who has the model can check. The format is described in docs/receipts.md."""
