"""Reference profiles of the machines people train on, from other people's measurements."""
