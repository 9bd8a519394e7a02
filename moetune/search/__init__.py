"""The search on a running layer as an Optuna study. Only this package imports Optuna."""

from moetune.search.study import TuningStudy

__all__ = ["TuningStudy"]
