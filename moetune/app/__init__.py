"""Use cases of the command line and the service; `wiring` opens the real store and devices."""
