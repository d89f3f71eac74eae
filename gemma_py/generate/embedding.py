"""Embeddings of texts: the prompts of tasks, the checks of a request, and passes that compute several texts at once.

A whole text is computed in one pass, because attention is bidirectional. The other texts of a pass do not change the
bits of a text's embedding.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gemma_py.errors import ComputationError, ContextError, InputError
from gemma_py.kernels.pooling import normalise_rows
from gemma_py.runtime.cache import Cache
from gemma_py.runtime.runner import CHUNK, SequenceInput
from gemma_py.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from gemma_py.generate.engine import Engine

_MOST_TEXTS = 64  # the most texts of a pass; each text needs KV rows of its own in memory
_QUERY, _SIMILARITY = "task: search result | query: ", "task: sentence similarity | query: "
_CLASSIFICATION, _CLUSTERING = "task: classification | query: ", "task: clustering | query: "
_CODE, _SUMMARY, _DOCUMENT = "task: code retrieval | query: ", "task: summarization | query: ", "title: none | text: "
_ANSWERING, _CHECKING = "task: question answering | query: ", "task: fact checking | query: "
# The prompts that EmbeddingGemma and EmbeddingGemma 2 have in common.
_COMMON = {
    "query": _QUERY, "document": _DOCUMENT, "BitextMining": _QUERY, "Clustering": _CLUSTERING,
    "Classification": _CLASSIFICATION, "InstructionRetrieval": _CODE, "MultilabelClassification": _CLASSIFICATION,
    "PairClassification": _SIMILARITY, "Reranking": _QUERY, "Retrieval": _QUERY, "Retrieval-query": _QUERY,
    "Retrieval-document": _DOCUMENT, "STS": _SIMILARITY,
}  # fmt: skip
# Prompts by model type and task, for checkpoints without config_sentence_transformers.json.
_PROMPTS: Mapping[str, Mapping[str, str]] = {
    "gemma-embedding": {
        **_COMMON, "question answering": _ANSWERING, "fact checking": _CHECKING, "classification": _CLASSIFICATION,
        "clustering": _CLUSTERING, "sentence similarity": _SIMILARITY, "code retrieval": _CODE,
        "summarization": _SUMMARY, "Summarization": _SUMMARY,
    },
    "gemma-embedding2": {
        **_COMMON, "SearchQuery": _QUERY, "Document": _DOCUMENT, "QuestionAnswering": _ANSWERING,
        "FactChecking": _CHECKING, "CodeRetrieval": _CODE, "SentenceSimilarity": _SIMILARITY,
        "Summarization": _SIMILARITY,
    },
}  # fmt: skip
Text = str | Sequence[int]


def prompts_of(checkpoint: Checkpoint) -> Mapping[str, str]:
    return checkpoint.modules.prompts or _PROMPTS[checkpoint.config.model_type]


def prompt_of(engine: "Engine", task: str | None) -> str:
    """Return the prompt that precedes each text of a task. Without a task, return the checkpoint's default prompt, or ""."""
    modules = engine.checkpoint.modules
    prompts = prompts_of(engine.checkpoint)
    name = modules.default if task is None else task
    if name is None:
        return ""
    if name not in prompts:
        raise InputError(f"task should be one of {', '.join(repr(known) for known in prompts)}, found {task!r:.60}")
    return prompts[name]


def width_of(engine: "Engine", dimensions: int | None) -> int:
    """Return the number of dimensions to compute, by default all. If the model has fewer dimensions, raise InputError."""
    most = engine.program.outputs
    if dimensions is None:
        return most
    if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= most:
        raise InputError(f"dimensions should be 1 to {most}, found {dimensions!r:.40}")
    return dimensions


def texts_to_ids(engine: "Engine", texts: Sequence[Text], task: str | None = None) -> list[list[int]]:
    """Return the token ids of each text. An element may also be a list of token ids, which is checked, but not changed.

    A text gets the prompt of the task, and the bos and eos tokens that the checkpoint's tokenizer adds.
    """
    check_embeds(engine)
    if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Sequence | np.ndarray):
        raise InputError(f"texts should be a list of texts or of lists of token ids, found {texts!r:.60}")
    prompt, made = prompt_of(engine, task), []
    for number, text in enumerate(texts):
        if not isinstance(text, str) and task is not None:
            raise InputError(f"a task needs texts, because its prompt is text; found token ids as text {number}")
        try:
            ids = _encoded(engine, prompt + text) if isinstance(text, str) else engine.check_ids(text)
        except InputError as error:
            raise InputError(f"text {number}: {error}") from None
        if len(ids) > engine.context:
            raise ContextError(f"text {number}: {len(ids)} tokens exceed the context of {engine.context} tokens")
        made.append(ids)
    return made


def _encoded(engine: "Engine", text: str) -> list[int]:
    end = engine.checkpoint.text_end
    return engine.encode(text) + ([] if end is None else engine.check_ids([end]))


def check_embeds(engine: "Engine") -> None:
    if engine.config.embedding is None:
        raise InputError(f"{engine.path}: this model generates text; only an embedding model can embed texts")


def check_generates(engine: "Engine") -> None:
    if engine.config.embedding is not None:
        raise InputError(f"{engine.path}: this is an embedding model, which generates no text; use embed")


def embed_all(engine: "Engine", texts: Sequence[list[int]]) -> np.ndarray:
    """Return the embedding of each text, f32 [N, D], not yet normalised. texts: token ids"""
    made, caches = np.empty((len(texts), engine.program.outputs), np.float32), list[Cache]()
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]), reverse=True)
    while order:
        count = how_many([len(texts[number]) for number in order[:_MOST_TEXTS]])
        chosen, order = order[:count], order[count:]
        made[chosen] = embed_pass(engine, [texts[number] for number in chosen], caches)
    return made


def how_many(lengths: Sequence[int]) -> int:
    """Return how many of the first texts fit into one pass. lengths: the number of tokens of each text."""
    totals = np.cumsum(lengths[:_MOST_TEXTS])
    return max(1, int(np.searchsorted(totals, CHUNK, "right")))


def embed_pass(engine: "Engine", texts: Sequence[list[int]], caches: list[Cache]) -> np.ndarray:
    """Compute the texts in one pass. Return the embeddings, f32 [N, D], not yet normalised.

    caches: KV caches to reuse, one for each text. Missing caches are appended to the list.
    """
    caches += [engine.new_cache() for _ in range(len(texts) - len(caches))]
    for cache in caches:
        cache.rewind(0)
    return np.concatenate(engine.run_together([SequenceInput(*pair) for pair in zip(caches, texts, strict=False)]))


def normalised(made: np.ndarray, width: int) -> np.ndarray:
    """Return the first `width` elements of each embedding, scaled to length 1: f32 [N, width].

    made: the embeddings, f32 [N, D]
    """
    result = np.empty((len(made), width), np.float32)
    normalise_rows(made, width, result)
    if not np.isfinite(result).all():
        raise ComputationError("an embedding has NaN or infinite elements")
    return result


def embeddings(engine: "Engine", texts: Sequence[Text], task: str | None, dimensions: Any) -> np.ndarray:
    ids, width = texts_to_ids(engine, texts, task), width_of(engine, dimensions)
    return normalised(embed_all(engine, ids), width)
