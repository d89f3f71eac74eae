"""Print a script that completes commands and options in bash.

Once, or in ~/.bashrc:  eval "$(gemma_py completion)"
"""

import argparse

_SCRIPT = """_gemma_py() {
  local words
  if [ "$COMP_CWORD" = 1 ]; then words="%s"; else
    case "${COMP_WORDS[1]}" in
%s
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _gemma_py gemma_py"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> None:
    cases = [f'      {name}) words="{" ".join(options(command))}" ;;' for name, command in args.commands.items()]
    print(_SCRIPT % (" ".join(args.commands), "\n".join(cases)))


def options(command: argparse.ArgumentParser) -> list[str]:
    return [word for action in command._actions for word in action.option_strings if word.startswith("--")]
