LAYER = 1
# PLACES: (layer, phase). The head counts as a layer after the last one.
LAYERS = ("query, key and value", "rope and kv", "scores", "attention", "output input", "output", "middle", "gate and up",
          "down input", "down", "end")  # fmt: skip
PLACES = [(0, "embedding"), *((LAYER, phase) for phase in LAYERS), (2, "head")]
