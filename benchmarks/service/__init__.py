"""The plan service under load: its answers, its start, its page in a browser."""
