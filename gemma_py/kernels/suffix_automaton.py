"""A suffix automaton: finds the longest suffix of a text that also occurs earlier in the text.

Every state stands for substrings that end at the same positions of the text. `last` is the state of the whole text. Its
suffix link is the state of the longest suffix that also occurs earlier, so that no search is needed.

N tokens of text   S states, at most 2 N + 1   E edges, at most 3 N + 1   H slots of the hash table, a power of two
"""

import numpy as np

from gemma_py.kernels.decorator import inlined, kernel

LENGTH, LINK, END, EDGES = range(4)  # columns of the states
STATE, TOKEN, TARGET, NEXT = range(4)  # columns of the edges
STATES_USED, EDGES_USED, TEXT_USED, LAST, MATCHED = range(5)  # entries of the counts
_NONE = -1
# A new token ends an occurrence of every suffix of the text. Only this many states of suffixes get the new position, because
# a repetitive text has as many such states as tokens, and updating all of them for every token would take too long.
_UPDATED = 8


@inlined
def _slot(table, edges, state, token):
    """Return the slot of the hash table that has the edge of a state for a token, or the empty slot for this edge."""
    mask = table.shape[0] - 1
    mixed = np.int64(state) * 0x9E3779B1 ^ np.int64(token) * 0x85EBCA77
    at = (mixed ^ (mixed >> 15)) & mask
    while table[at] != _NONE:
        edge = table[at]
        if edges[edge, STATE] == state and edges[edge, TOKEN] == token:
            break
        at = (at + 1) & mask
    return at


@inlined
def _add_edge(states, edges, table, counts, state, token, target):
    edge = counts[EDGES_USED]
    counts[EDGES_USED] = edge + 1
    table[_slot(table, edges, state, token)] = edge
    edges[edge, STATE], edges[edge, TOKEN], edges[edge, TARGET] = state, token, target
    edges[edge, NEXT] = states[state, EDGES]
    states[state, EDGES] = edge


@inlined
def _add_state(states, counts, length, link, end):
    state = counts[STATES_USED]
    counts[STATES_USED] = state + 1
    states[state, LENGTH], states[state, LINK], states[state, END], states[state, EDGES] = length, link, end, _NONE
    return state


@inlined
def _link_of(states, edges, table, counts, state, token, added):
    """Add the edges for `token` that lead to the new state `added`, and return the suffix link of that state.

    state: the state of the text before the token.
    """
    while state != _NONE:
        edge = table[_slot(table, edges, state, token)]
        if edge != _NONE:
            break
        _add_edge(states, edges, table, counts, state, token, added)
        state = states[state, LINK]
    if state == _NONE:
        return np.int64(0)
    found = np.int64(edges[edge, TARGET])
    length = states[state, LENGTH] + 1
    if states[found, LENGTH] == length:
        return found
    copied = _add_state(states, counts, length, states[found, LINK], states[found, END])
    edge = states[found, EDGES]
    while edge != _NONE:
        _add_edge(states, edges, table, counts, copied, edges[edge, TOKEN], edges[edge, TARGET])
        edge = edges[edge, NEXT]
    while state != _NONE:
        edge = table[_slot(table, edges, state, token)]
        if edge == _NONE or edges[edge, TARGET] != found:
            break
        edges[edge, TARGET] = copied
        state = states[state, LINK]
    states[found, LINK] = copied
    return copied


@kernel
def extend(states, edges, table, text, counts, tokens):
    """Append tokens to the text.

    states: int32 [S, 4], edges: int32 [E, 4], table: int32 [H], text: int32 [N], counts: int64 [5], all read and written
    tokens: [n] int32, read
    """
    for n in range(tokens.shape[0]):
        token, at = tokens[n], counts[TEXT_USED]
        text[at] = token
        counts[TEXT_USED] = at + 1
        last = counts[LAST]
        added = _add_state(states, counts, states[last, LENGTH] + 1, 0, at)
        state = _link_of(states, edges, table, counts, last, token, added)
        states[added, LINK] = state
        counts[LAST], counts[MATCHED] = added, states[state, END]
        for _ in range(_UPDATED):
            if state <= 0:
                break
            states[state, END] = at
            state = states[state, LINK]


@kernel
def rehash(edges, table, counts):
    """Fill an empty hash table with all edges.

    edges: int32 [E, 4], read   table: int32 [H], written   counts: int64 [5], read
    """
    for edge in range(counts[EDGES_USED]):
        table[_slot(table, edges, edges[edge, STATE], edges[edge, TOKEN])] = edge


@kernel
def continuation(states, edges, table, text, counts, ahead, made):
    """Find the longest suffix of (text + the tokens `ahead`) that also occurs earlier in the text. Write to `made` the tokens
    that followed the suffix's latest known occurrence.

    If `made` has room for more tokens, the written tokens are repeated. Return the length of the suffix, and the position in
    the text of the first token written.

    states: int32 [S, 4], edges: int32 [E, 4], table: int32 [H], text: int32 [N], counts: int64 [5], ahead: int32 [n], all
    read   made: int32 [k], written if the length is not 0
    """
    state = np.int64(max(0, states[counts[LAST], LINK]))
    length, first = np.int64(states[state, LENGTH]), counts[MATCHED] + 1
    for n in range(ahead.shape[0]):
        edge = table[_slot(table, edges, state, ahead[n])]
        while edge == _NONE and state != 0:
            state = np.int64(states[state, LINK])
            length = np.int64(states[state, LENGTH])
            edge = table[_slot(table, edges, state, ahead[n])]
        if edge != _NONE:
            state, length = np.int64(edges[edge, TARGET]), length + 1
        first = np.int64(states[state, END]) + 1
    if length > 0:
        used = counts[TEXT_USED]
        for n in range(made.shape[0]):
            at = first + n % (used + ahead.shape[0] - first)
            made[n] = text[at] if at < used else ahead[at - used]
    return length, first
