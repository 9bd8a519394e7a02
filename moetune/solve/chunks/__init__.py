"""Model states in chunks: their size, cache and offload (Elixir)."""
