"""The command line, one file per command: parse the flags, call one use case, render its result."""
