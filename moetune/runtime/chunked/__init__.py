"""Model states in chunks: sharded over data-parallel ranks, cached whole, offloaded (Elixir)."""
