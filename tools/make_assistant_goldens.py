"""Write tests/data/tiny_assistants.npz: steps of tiny random assistants of Gemma 4, computed by transformers in
float32.

    python tools/make_assistant_goldens.py [--check]

Needs the extra `oracle`. With --check nothing is written; instead, the stored results are compared with new ones. The
tests create the checkpoints from seeds, so only results are stored: for each variant, the logits [STEPS, V] and the
hidden states [STEPS, B] of the steps after a prompt. Each step takes the likeliest token of the step before.

Here, the assistant gets the last W - 1 keys and values of each sliding layer, which transformers' sliding cache keeps
for the next token. After a prompt, transformers itself would pass W + 1.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import tiny_checkpoints as tiny
import tiny_families
import torch
import transformers
from make_goldens import quiet, token_ids
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

DATA = Path(__file__).parent.parent / "tests" / "data" / "tiny_assistants.npz"
MAIN_SEED, SEED, PROMPT_SEED, STEPS = 1, 2, 1, 4
# Without assistants of multimodal checkpoints, whose text model transformers loads as another class.
NAMES = [name for name in tiny_families.ASSISTANTS if "wrapped" not in name]


def _mend_sharing_modes() -> None:
    """Work around two limits of transformers 5.23.0.

    transformers refuses a model in which no layer has keys and values of its own, as in an assistant. And a main model
    whose layers share no KV rows does not return the keys and values that an assistant needs.
    """
    original = Gemma4TextConfig.kv_sharing_modes.fget

    def kv_sharing_modes(self: Gemma4TextConfig) -> list[str | None]:
        count = self.num_hidden_layers
        if self.num_kv_shared_layers == count:
            return ["reuse"] * count
        if self.num_kv_shared_layers:
            return original(self)
        last = {kind: number for number, kind in enumerate(self.layer_types)}
        return ["store" if number in last.values() else None for number in range(count)]

    Gemma4TextConfig.kv_sharing_modes = property(kv_sharing_modes)


def steps(name: str, scratch: Path) -> tuple[np.ndarray, np.ndarray]:
    variant = tiny_families.VARIANTS[name.split()[0]]
    tiny.write(variant, scratch / "main", MAIN_SEED)
    tiny.write(tiny_families.ASSISTANTS[name], scratch / "assistant", SEED)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        scratch / "main", experts_implementation="eager", **options
    )
    assistant, info = transformers.Gemma4AssistantForCausalLM.from_pretrained(
        scratch / "assistant", output_loading_info=True, **options
    )
    if set(info["missing_keys"]) - {"masked_embedding.token_ordering"} or info["unexpected_keys"]:
        raise SystemExit(f"{name}: {info}")
    text = tiny.text_config(variant)
    V, W = text["vocab_size"], text["sliding_window"]
    if assistant.masked_embedding is not None:
        assistant.masked_embedding.token_ordering.copy_(torch.arange(V).reshape(8, -1).T.reshape(-1))
    ids = torch.tensor([token_ids(PROMPT_SEED, V)])
    with torch.no_grad():
        out = model(ids, use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
        rows = dict(out.shared_kv_states.items())
        rows["sliding_attention"] = tuple(part[:, :, 1 - W :] for part in rows["sliding_attention"])
        token, hidden = out.logits[:, -1:].argmax(-1), out.hidden_states[-1][:, -1:]
        logits, states = [], []
        for _ in range(STEPS):
            made = assistant(
                inputs_embeds=torch.cat([model.get_input_embeddings()(token), hidden], -1),
                position_ids=torch.tensor([[ids.shape[1]]]), shared_kv_states=rows,
            )  # fmt: skip
            token, hidden = made.logits.argmax(-1), made.last_hidden_state
            logits.append(made.logits[0, 0].numpy())
            states.append(hidden[0, 0].numpy())
    return np.stack(logits), np.stack(states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the stored results instead of writing them")
    check = parser.parse_args().check
    quiet()
    _mend_sharing_modes()
    made: dict[str, np.ndarray] = {}
    for name in NAMES:
        with tempfile.TemporaryDirectory() as scratch:
            made[f"{name} logits"], made[f"{name} hidden"] = steps(name, Path(scratch))
    if not check:
        np.savez_compressed(DATA, **made)  # type: ignore[arg-type]
        return
    with np.load(DATA) as stored:
        worst = max(float(np.abs(stored[key] - value).max()) for key, value in made.items())
    print(f"the largest difference is {worst:.1e}")
    if worst > 1e-4:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
