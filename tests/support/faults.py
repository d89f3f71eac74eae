"""Where a fault is planted: every phase of the pass."""

from gemma_py.runtime import forward as passes

LAYER = 1
# (layer, phase) of every phase of the pass; the last layer's number belongs to the head.
PLACES = [(0, passes.EMBED), *((LAYER, phase) for phase in range(passes.QKV, passes.HEAD)), (2, passes.HEAD)]
