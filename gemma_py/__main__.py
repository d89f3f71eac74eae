from gemma_py.cli.main import entry

entry()
