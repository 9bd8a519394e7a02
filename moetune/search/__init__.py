"""Searches on a running layer, as Optuna studies. Only this package imports Optuna."""

from moetune.search.study import TuningStudy

__all__ = ["TuningStudy"]
