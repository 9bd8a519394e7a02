"""Model states in chunks: sharded over data-parallel ranks, cached, offloaded (Elixir)."""
