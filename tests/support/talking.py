from typing import Any

import gemma_py
from gemma_py import Conversation, Sampling

# The logit_bias forbids control tokens, which a model with random weights would often choose.
DRAW = Sampling(temperature=1.0, top_k=50, seed=5, logit_bias=dict.fromkeys(range(11), -100.0))


def talk(conversation: Conversation, text: str) -> str:
    return "".join(token.text for token in conversation.send(text))


def fresh_digest(engine: gemma_py.Engine, ids: list[int]) -> list[str]:
    session = engine.session()
    session.prefill(ids)
    return session.kv_digest()


def new(engine: gemma_py.Engine, **options: Any) -> Conversation:
    return Conversation(engine, **{"sampling": DRAW, "max_tokens": 20, **options})
