"""The command line: one file a command, all of it derived from the config dataclasses."""
