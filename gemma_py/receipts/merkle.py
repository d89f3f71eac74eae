"""The root of a Merkle tree, as in RFC 6962, section 2.1, with sha256."""

import hashlib
from collections.abc import Sequence


def root(leaves: Sequence[bytes]) -> bytes:
    """leaves: at least one; a leaf may have any length"""
    nodes = [hashlib.sha256(b"\0" + leaf).digest() for leaf in leaves]
    # Joining neighbours level by level, and leaving a last node without a neighbour as it is, gives the RFC's tree.
    while len(nodes) > 1:
        pairs = [hashlib.sha256(b"\1" + a + b).digest() for a, b in zip(nodes[::2], nodes[1::2], strict=False)]
        nodes = pairs + nodes[2 * len(pairs) :]
    return nodes[0]
