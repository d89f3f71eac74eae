"""Make a pair of keys to sign receipts with.

FILE gets the private key, which only its user can read, and FILE.pub the public key. Neither is printed. Needs the extra `sign`.

With --json: {"keyid", "private", "public"}; the last two are the paths.
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
