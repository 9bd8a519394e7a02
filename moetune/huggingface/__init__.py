"""Hugging Face models: their `config.json` read into a decoder, and a registry of named models."""
