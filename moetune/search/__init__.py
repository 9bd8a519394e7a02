"""Searches on a running layer. Optuna lives only here."""

from moetune.search.study import TuningStudy

__all__ = ["TuningStudy"]
