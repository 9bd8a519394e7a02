"""Use cases: each one function that joins the parts; `wiring` makes the real adapters."""
