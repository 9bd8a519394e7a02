"""The joint plan of a language model's step beside its parts alone, DDP and random plans."""
