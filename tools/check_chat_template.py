"""Compare the prompts of 500 random conversations with transformers' apply_chat_template.

    python tools/check_chat_template.py [TEMPLATE] [--tokenizer FOLDER] [--write]

TEMPLATE: a Jinja file (default: tests/data/gemma4.jinja, which was written for the tests).
--tokenizer: a folder with a tokenizer.json (default: a random vocabulary with the structure of Gemma 4's).
--write: store transformers' ids as the golden file of the test. This needs the extra `oracle`.

The exit code is 1 if a prompt differs.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import gemma4_conversations
import transformers
from gemma4_vocabulary import Gemma4Vocabulary
from repository import DATA

from gemma_py.templates.chat_format import ChatFormat
from gemma_py.templates.template import choose
from gemma_py.tokenizer import tokenizer_from_json


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("template", type=Path, nargs="?", default=DATA / "gemma4.jinja")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = (args.tokenizer or Path(folder)) / "tokenizer.json"
        if args.tokenizer is None:
            file.write_text(json.dumps(Gemma4Vocabulary().document()))
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<bos>", eos_token="<eos>")
        theirs.chat_template = args.template.read_text()
        tokenizer = tokenizer_from_json(file)
        form = ChatFormat(choose(tokenizer, None, (1,), args.template), tokenizer)
        expected, wrong = [], 0
        for drawn in gemma4_conversations.draw(500):
            switch = {} if drawn.thinking is None else {"enable_thinking": drawn.thinking}
            ids = theirs.apply_chat_template(
                drawn.messages, tools=drawn.tools or None, add_generation_prompt=True, return_dict=False, **switch
            )
            expected.append(list(ids))
            wrong += form.prompt(drawn.messages, drawn.tools, drawn.thinking) != expected[-1]
    if args.write:
        gemma4_conversations.write_golden(expected)
    print(json.dumps({"conversations": len(expected), "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
