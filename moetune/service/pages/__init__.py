"""The page: machines, profiles, plans and what became of them, in a browser."""

from moetune.service.pages.routes import mount

__all__ = ["mount"]
