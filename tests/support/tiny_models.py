"""The tiny variants of all model families that gemma_py runs."""

import tiny_checkpoints as tiny
import tiny_families

GEMMA4 = ("gemma4-e2b", "gemma4-e4b-wrapped-old-config", "gemma4-dense", "gemma4-dense-untied-old-config",
          "gemma4-experts", "gemma4-experts-wrapped-old-config", "gemma4-unified", "gemma4-unified-wrapped")  # fmt: skip
VARIANTS = tiny.VARIANTS | {name: tiny_families.VARIANTS[name] for name in ("gemma3n-wrapped", *GEMMA4)}
