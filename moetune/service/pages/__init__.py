"""The page: machines, profiles, plans and what became of them, for a browser without the network."""

from moetune.service.pages.mount import mount

__all__ = ["mount"]
