"""Make a pair of keys for signing receipts.

The private key is written to FILE, which only you can read. The public key is written to FILE.pub. Needs the extra `sign`.

With --json: {"keyid", "private", "public"}, where private and public are paths.
"""

import argparse
from pathlib import Path

from gemma_py.cli.common import print_json
from gemma_py.receipts.envelope import PUBLIC, new_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the file of the private key, which must not exist")


def run(args: argparse.Namespace) -> None:
    keyid = new_key(args.file)
    if args.json:
        print_json({"keyid": keyid, "private": str(args.file), "public": f"{args.file}{PUBLIC}"})
    else:
        print(f"private key: {args.file}\npublic key: {args.file}{PUBLIC}\nid of the key: {keyid}")
